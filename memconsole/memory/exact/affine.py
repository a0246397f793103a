"""Exact live bytes of a traced step at any micro-batch size and sequence length, in pure Python.

One trace is taken per structure. The structure is everything, apart from sizes, that decides which tensors a step
makes. The bytes of each tensor are proportional to one of `TERMS`, so each moment is a sum of a few products. A phase's
peak is its largest moment at the given sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from memconsole.memory.activations.kernels import CAPPED_QUERIES, attends_in_parts
from memconsole.memory.activations.torch_masks import MASK_ALIGNMENT
from memconsole.memory.activations.torch_timeline import CHUNK_TOKENS, EMBEDDING_FEW
from memconsole.memory.exact.timeline import AffineMoment, AffineTimeline, Exact, ExactPhase
from memconsole.memory.step_key import step_settings
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan

TERMS = ("1", "S", "B·S", "S²", "B·S²", "chunk", "rest", "B")
"""The sizes that bytes can be proportional to. B is the micro-batch size and S the sequence length. "chunk" is the
rows of a full chunk of the loss, "rest" those of its last chunk if there are several. A single chunk has B·S rows."""
CHUNKS = 3
"""Most chunks in a traced loss: two full chunks and the rest show every transition that can occur."""


def chunks(tokens: int) -> int:
    """Number of loss chunks that a trace of `tokens` tokens must have."""
    return min(CHUNKS, -(-tokens // CHUNK_TOKENS))


def sizes(batch: int, length: int) -> tuple[int, ...]:
    """The values of `TERMS`."""
    tokens = batch * length
    several = tokens > CHUNK_TOKENS
    rest = tokens % CHUNK_TOKENS or CHUNK_TOKENS
    return (
        1,
        length,
        tokens,
        length * length,
        tokens * length,
        CHUNK_TOKENS if several else tokens,
        rest if several else tokens,
        batch,
    )


def structure_key(plan: Plan, model: Model, kind: str) -> str:
    """The key of a timeline. Plans with the same key differ only in micro-batch size and sequence length.

    It contains neither versions nor the backend's code; code that stores timelines must add them.
    """
    parts = (
        kind,
        model_hash(model),
        repr(step_settings(plan, kind)),
        *_regime(plan, model, kind),
        *_evaluated(plan),
    )
    return " ".join(parts)


def covers(timeline: AffineTimeline, plan: Plan, model: Model, kind: str) -> bool:
    """Whether `timeline` is valid for `plan` at its batch size and length."""
    sizes_of = (plan.train.batch_size, plan.data.sequence_length)
    if timeline.only is not None and timeline.only != sizes_of:
        return False
    return timeline.key == structure_key(plan, model, kind)


def evaluate(
    timeline: AffineTimeline, batch: int, length: int, evaluation_batch: int | None = None
) -> Exact:
    """Every phase's peak at `batch` rows of `length` tokens, which the timeline must cover. An evaluation has
    `evaluation_batch` rows, or `batch` if that is None.

    Reserved bytes are the live peak times the share from the replay at the traced sizes.
    """
    phases = {}
    for name, moments in timeline.phases.items():
        values = sizes(evaluation_batch or batch if name == "evaluation" else batch, length)
        one, span, tokens, square, scores, chunk, rest, rows = values
        largest, most = moments[0], -1
        for moment in moments:
            a, b, c, d, e, f, g, h = moment.total
            total = a * one + b * span + c * tokens + d * square + e * scores
            total += f * chunk + g * rest + h * rows
            if total > most:
                largest, most = moment, total
        components = {
            component: sum(c * v for c, v in zip(coefficients, values, strict=True))
            for component, coefficients in largest.components.items()
        }
        phases[name] = ExactPhase(
            total_bytes=most, components={n: size for n, size in components.items() if size}
        )
    peak = max(phase.total_bytes for phase in phases.values())
    share = timeline.reserved_share
    return Exact(
        phases=phases,
        reserved_bytes=None if share is None else int(peak * share),
        source=timeline.source,
        caveat=timeline.caveat,
    )


def largest_moments(moments: Iterable[AffineMoment]) -> tuple[AffineMoment, ...]:
    """`moments` without those that are smaller than another one at every size."""
    front: list[tuple[tuple[int, ...], AffineMoment]] = []
    seen: set[tuple[int, ...]] = set()
    for moment in moments:
        if moment.total in seen:
            continue
        seen.add(moment.total)
        weight = _weight(moment.total)
        if any(_outweighs(other, weight) for other, _ in front):
            continue
        front = [(w, m) for w, m in front if not _outweighs(weight, w)]
        front.append((weight, moment))
    return tuple(moment for _, moment in front)


def _weight(c: tuple[int, ...]) -> tuple[int, ...]:
    """Sums of coefficients. If each sum of `a` is at least that of `b`, `a` is at least `b` at every size.

    For 1 ≤ S ≤ B·S ≤ B·S² and rest ≤ chunk: a sum c0·x0 + c1·x1 with x0 ≤ x1 is
    (c0 + c1)·x0 + c1·(x1 - x0), and both factors are non-negative. S² and B are compared directly.
    """
    one, length, tokens, square, scores, chunk, rest, rows = c
    return (
        one + length + tokens + scores,
        length + tokens + scores,
        tokens + scores,
        scores,
        square,
        chunk + rest,
        chunk,
        rows,
    )


def _outweighs(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))


def _regime(plan: Plan, model: Model, kind: str) -> tuple[str, ...]:
    """The properties of the sizes that change which tensors a step makes."""
    batch, length = plan.train.batch_size, plan.data.sequence_length
    if not isinstance(model, Architecture):
        return (f"rows={'one' if batch == 1 else 'many'}",)
    a = model
    tokens, cut = batch * length, a.windowed(length)
    parts = [f"rows={'one' if batch == 1 else 'many'}", f"chunks={chunks(tokens)}"]
    parts.append(f"windowed={cut}")
    if attends_in_parts(plan, a):
        parts.append(f"queries={'part' if length > CAPPED_QUERIES else 'all'}")
    if kind in ("gpu", "rocm"):
        parts.append(f"embedding={_embedding(tokens, a)}")
        if cut or plan.data.isolate_documents:
            parts.append(f"aligned={length % MASK_ALIGNMENT == 0}")
    return tuple(parts)


def _embedding(tokens: int, a: Architecture) -> str:
    """What decides the workspace of the embedding's gradient."""
    if tokens <= EMBEDDING_FEW:
        return "few"
    return "rows" if tokens <= a.vocab_size else "vocabulary"


def _evaluated(plan: Plan) -> tuple[str, ...]:
    """The part of the key for a separate evaluation batch size, which has its own chunks and its own one-row case."""
    rows = plan.train.evaluation_batch_size
    if rows is None:
        return ()
    return (f"evaluation={rows},{chunks(rows * plan.data.sequence_length)}",)


@lru_cache(maxsize=256)
def model_hash(model: Model) -> str:
    """A hash of every field, as sixteen hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(model)).hexdigest()[:16]
