"""Rotary positions (RoPE): the angles by which a head's pairs of elements turn from one token to the next.

Both backends read them from here. Su et al. 2021, arXiv:2104.09864, §3.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How angles change for rows longer than those of pretraining. The kinds are transformers' `rope_type`."""

    kind: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    factor: float = 8.0
    """Pairs that turn slowly turn `factor` times as slowly; with `linear`, all pairs do."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    """The longest rows of pretraining, in tokens."""
    beta_fast: float = 32.0
    """YaRN keeps pairs that make more turns than this in a row of pretraining."""
    beta_slow: float = 1.0
    """YaRN slows pairs that make fewer turns than this by the whole `factor`."""
    truncate: bool = True
    """Whether YaRN begins and ends its ramp at whole pairs."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines (YaRN, LongRoPE)."""
    short_factors: tuple[float, ...] = ()
    """Divisors of LongRoPE, one for each pair, in rows of at most `original_positions` tokens."""
    long_factors: tuple[float, ...] = ()
    """The same in longer rows."""
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + query_beta · ln(1 + ⌊p / original_positions⌋) (Ministral 3, after
    Llama 4)."""


def angles(
    size: int, theta: float, scaling: RopeScaling | None = None, length: int = 1
) -> tuple[float, ...]:
    """Radians that each of `size` / 2 pairs turns from one token to the next, in rows of `length` tokens."""
    plain = tuple(theta ** (-2 * pair / size) for pair in range(size // 2))
    if scaling is None:
        return plain
    if scaling.kind == "longrope":
        long = length > scaling.original_positions
        divisors = scaling.long_factors if long else scaling.short_factors
        return tuple(angle / by for angle, by in zip(plain, divisors, strict=True))
    shares = _unscaled_shares(plain, size, theta, scaling)
    return tuple(
        share * angle + (1 - share) * angle / scaling.factor
        for share, angle in zip(shares, plain, strict=True)
    )


def _unscaled_shares(
    plain: tuple[float, ...], size: int, theta: float, scaling: RopeScaling
) -> Iterator[float]:
    """The share of each pair's angle that is not divided by the factor."""
    if scaling.kind == "linear":
        yield from (0.0 for _ in plain)
    elif scaling.kind == "llama3":
        # A ramp over the turns that a pair makes in a row of pretraining.
        low, span = scaling.low_freq_factor, scaling.high_freq_factor - scaling.low_freq_factor
        turns = (scaling.original_positions * angle / math.tau for angle in plain)
        yield from (_within_0_and_1((count - low) / span) for count in turns)
    else:
        first, last = _yarn_ramp(size, theta, scaling)
        yield from (
            1 - _within_0_and_1((pair - first) / (last - first)) for pair in range(len(plain))
        )


def _yarn_ramp(size: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The pairs at which YaRN's ramp begins and ends (Peng et al. 2023, arXiv:2309.00071, §3.2)."""
    first, last = (
        size * math.log(scaling.original_positions / (turns * math.tau)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return first, last if last != first else last + 0.001


def _within_0_and_1(share: float) -> float:
    return min(max(share, 0.0), 1.0)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of the scores' root (Peng et al. 2023, §3.3)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_positions: int) -> float:
    """LongRoPE's (Ding et al. 2024, arXiv:2402.13753, as in Phi-3): rows are `factor` times as long as in pretraining."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_positions))
