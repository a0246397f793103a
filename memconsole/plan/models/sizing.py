"""Chooses a decoder shape for a wanted number of parameters.

Width, depth and the MLP's intermediate size are free; the last one is the fine adjustment. The embedding
counts too, so a vocabulary that leaves nothing for the layers is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import PlanError

TOLERANCE = 0.02
"""Largest accepted |parameters - target| / target."""
ASPECT = (32, 128)
"""Allowed hidden_size / layers (Kaplan et al. 2020, §3.1: loss is flat over a wide range of it)."""
HEAD_SIZE = (32, 128)
"""Allowed elements of a head."""
MLP_RATIO = 8 / 3
"""intermediate / hidden of a gated MLP with the size of a plain 4x one (Shazeer 2020, §3)."""
MLP_RATIO_RANGE = (1.0, 8.0)
"""Allowed intermediate / hidden."""
TIE_ABOVE = 0.1
"""Input and output embedding are tied if one of them is more than this share of the target."""
SMALLEST_VOCABULARY = 257
"""256 bytes and one end-of-document token."""


def default_vocab_size(target_params: int) -> int:
    """Default vocabulary of a sized model: 4,096 at 1 M parameters, 32,000 from 60 M.

    Growing with the square root of the parameters keeps the embedding near a third of a small
    model and a few percent of a large one.
    """
    exact = 4096 * math.sqrt(target_params / 1_000_000)
    return max(1024, min(32_000, round(exact / 256) * 256))


def size(target_params: int, vocab_size: int, max_positions: int) -> Architecture:
    """A Llama-like decoder within 2 % of `target_params`.

    If the embedding alone is too large, raises `PlanError` with a vocabulary that would fit.
    """
    shape = _best(target_params, vocab_size, max_positions)
    if shape is not None:
        return shape
    fitting = _largest_vocabulary(target_params, vocab_size, max_positions)
    advice = (
        f"a vocabulary of {fitting:,} or less fits (data.vocab_size)"
        if fitting
        else "no vocabulary fits so small a model"
    )
    raise PlanError(
        f"model.target_params = {target_params:,}: no shape within 2 % has a vocabulary of "
        f"{vocab_size:,}; {advice}",
        "model.target_params",
    )


@lru_cache(maxsize=1024)
def _largest_vocabulary(target: int, vocab_size: int, max_positions: int) -> int:
    """The largest vocabulary below `vocab_size` for which there is a shape (0: none)."""
    low, high = SMALLEST_VOCABULARY - 1, vocab_size
    while high - low > 1:
        middle = (low + high) // 2
        if _best(target, middle, max_positions) is None:
            high = middle
        else:
            low = middle
    return low if low >= SMALLEST_VOCABULARY else 0


@lru_cache(maxsize=1024)
def _best(target: int, vocab_size: int, max_positions: int) -> Architecture | None:
    """The shape with the lowest score; None if there is none."""
    scored = (
        (score, shape)
        for hidden in _widths(target, vocab_size)
        for shape, score in _shapes(target, vocab_size, max_positions, hidden)
    )
    return min(scored, key=lambda pair: pair[0], default=(0.0, None))[1]


def _widths(target: int, vocab_size: int) -> Iterator[int]:
    """Hidden sizes worth trying: those whose layers, at any allowed aspect, can reach the target."""
    step = 16 if target < 20_000_000 else 64
    hidden = step if step >= HEAD_SIZE[0] else HEAD_SIZE[0]
    while vocab_size * hidden < target:
        rest = target - vocab_size * hidden
        block = hidden * hidden  # one layer has (2 + 2·kv/heads + 3·intermediate/hidden) of these
        least = max(1, math.ceil(hidden / ASPECT[1])) * block * (2.5 + 3 * MLP_RATIO_RANGE[0])
        most = hidden // ASPECT[0] * block * (4 + 3 * MLP_RATIO_RANGE[1])
        if least > rest * (1 + TOLERANCE):
            return
        if most >= rest * (1 - TOLERANCE):
            yield hidden
        hidden += step


def _shapes(
    target: int, vocab_size: int, max_positions: int, hidden: int
) -> Iterator[tuple[Architecture, float]]:
    """Shapes of one width with their scores, lower better."""
    head_size = _head_size(hidden)
    if head_size is None:
        return
    heads = hidden // head_size
    kv_heads = _kv_heads(heads) if hidden >= 1024 else heads
    embedding = vocab_size * hidden
    tied = embedding > TIE_ABOVE * target
    outside = embedding * (1 if tied else 2) + hidden
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head_size + 2 * hidden
    ideal = (target - outside) / (attention + 3 * MLP_RATIO * hidden * hidden)
    fewest, most = math.ceil(hidden / ASPECT[1]), hidden // ASPECT[0]
    depths = {math.floor(ideal) - 1, math.floor(ideal), math.ceil(ideal), math.ceil(ideal) + 1}
    for layers in {min(max(depth, fewest, 1), most) for depth in depths}:
        wanted = (target - outside - layers * attention) / (3 * hidden * layers)
        intermediate = _rounded(wanted, 3 * hidden * layers / target)
        ratio = intermediate / hidden
        if not MLP_RATIO_RANGE[0] <= ratio <= MLP_RATIO_RANGE[1]:
            continue
        count = outside + layers * (attention + 3 * hidden * intermediate)
        error = abs(count - target) / target
        if error > TOLERANCE:
            continue
        shape = Architecture(
            family="llama",
            vocab_size=vocab_size,
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            intermediate_size=intermediate,
            max_positions=max_positions,
            tied_embeddings=tied,
        )
        yield shape, _score(shape, error)


def _score(shape: Architecture, error: float) -> float:
    """How far a shape is from the usual MLP ratio, from 64 elements of width a layer, from a width that kernels prefer, and
    from the target."""
    hidden = shape.hidden_size
    return (
        abs(math.log(shape.intermediate_size / hidden / MLP_RATIO))
        + 0.5 * abs(math.log(hidden / shape.layers / 64))
        + (0.0 if hidden % 64 == 0 else 0.15 if hidden % 32 == 0 else 0.5)
        + 5 * error
    )


def _rounded(wanted: float, share_of_one: float) -> int:
    """`wanted`, rounded to a multiple of the largest power of two that changes the parameters by at most 0.5 %."""
    for step in (64, 32, 16, 8, 4, 2):
        rounded = round(wanted / step) * step
        if abs(rounded - wanted) * share_of_one <= 0.005:
            return rounded
    return round(wanted)


def _head_size(hidden: int) -> int | None:
    """The even divisor of `hidden` between 32 and 128 that is nearest to the usual head size for this width."""
    usual = 32 if hidden < 256 else 64 if hidden < 2048 else 128
    divisors = [d for d in range(HEAD_SIZE[0], HEAD_SIZE[1] + 1, 2) if hidden % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / usual)), default=None)


def _kv_heads(heads: int) -> int:
    """Grouped-query attention (Ainslie et al. 2023): a quarter of the heads if divisible."""
    return next(heads // group for group in (4, 3, 2, 1) if heads % group == 0)
