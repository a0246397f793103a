"""Turns a recorded step into an affine timeline: finds how each allocation depends on the sizes, and its component.

A step is traced at sizes that have a prime factor which divides none of the model's own sizes. The bytes of a storage
then show which of these sizes they are a multiple of, and in which power.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from memconsole.memory.activations.kernels import CAPPED_QUERIES, attends_in_parts
from memconsole.memory.exact import affine
from memconsole.memory.exact.affine import TERMS
from memconsole.memory.exact.allocator import rounded
from memconsole.memory.exact.timeline import AffineMoment
from memconsole.memory.table import COMPONENTS
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, replace
from memconsole_torch.tracing.trace_liveness import Liveness, Storage
from memconsole_torch.tracing.trace_step import TracedSizes

_ONE = TERMS.index("1")
_TERM = {
    (0, 0): _ONE,
    (0, 1): TERMS.index("S"),
    (1, 1): TERMS.index("B·S"),
    (0, 2): TERMS.index("S²"),
    (1, 2): TERMS.index("B·S²"),
    (1, 0): TERMS.index("B"),
}
"""The term, by how often micro-batch size and sequence length divide the bytes."""
_CHUNK, _REST = TERMS.index("chunk"), TERMS.index("rest")
_SMALLEST = 37
_LARGEST = 4000


OUTSIDE = ("build", "end")
"""Pseudo-phases before the first step and after the end of the trace."""


class Coefficient(msgspec.Struct, frozen=True):
    """Bytes of a storage: `factor` times the value of a term."""

    term: int
    factor: int


class UntoldSizeError(ValueError):
    """The bytes of a storage are not a multiple of a single term."""


class TellingSizes(TracedSizes):
    """Sizes to trace at, and the rows of the last loss chunk (0 if there is only one chunk).

    `by_row`: some arrays have a size per row that does not depend on the length.
    """

    def __init__(
        self, batch: int, length: int, chunk: int, rest: int, *, by_row: bool = False
    ) -> None:
        super().__init__(batch, length, chunk)
        self.rest, self.by_row = rest, by_row

    def coefficient(self, nbytes: int) -> Coefficient:
        """What `nbytes` is proportional to. Raises `UntoldSizeError`."""
        for rows, term in ((self.chunk, _CHUNK), (self.rest, _REST)):
            if self.rest and nbytes and nbytes % rows == 0:
                return Coefficient(term, nbytes // rows)
        factor, times = nbytes, [0, 0]
        for position, size in enumerate((self.batch, self.length)):
            while size > 1 and factor and factor % size == 0:
                factor //= size
                times[position] += 1
        if self.batch == 1 and times[1]:
            times[0] = 1 if times[1] == 1 else 0
        told = (times[0], times[1])
        if nbytes and (told not in _TERM or (told == (1, 0) and not self.by_row)):
            raise UntoldSizeError(f"{nbytes} bytes at {self.batch} x {self.length}")
        return Coefficient(_TERM[told], factor)


def evaluating(plan: Plan) -> Plan:
    """`plan` with its evaluation batch size as the micro-batch size."""
    return replace(plan, {"train.batch_size": plan.evaluation_batch})


def has_table_of_positions(model: Model) -> bool:
    """Whether the model has a table of positions, so that rows cannot be longer than `max_positions`."""
    return not isinstance(model, Architecture) or model.positions == "learned"


def telling_sizes(plan: Plan, model: Model) -> TellingSizes | None:
    """Sizes in the plan's own regime with prime factors that divide none of the model's sizes; None if there are none.
    There are none for recommenders, whose loss and evaluation run in chunks of other sizes, nor for DPO, whose rows are
    an even number."""
    if isinstance(model, Recommender) or plan.rows_together > 1:
        return None
    length, text = plan.data.sequence_length, isinstance(model, Architecture)
    own = _own_sizes(model, plan.optimize.lora_rank)
    chunks = affine.chunks(plan.micro_batch_tokens) if text else 1
    most, least, by_row = _LARGEST, 2, not text
    if has_table_of_positions(model):
        most = min(most, model.max_positions)
    if isinstance(model, Architecture) and model.sliding_window is not None:
        if model.windowed(length):
            least, most = model.sliding_window + 1, model.sliding_window + _LARGEST
        else:
            most = min(most, model.sliding_window)
    if isinstance(model, Architecture) and attends_in_parts(plan, model):
        if length > CAPPED_QUERIES:
            least, by_row = max(least, CAPPED_QUERIES + 1), True
        else:
            most = min(most, CAPPED_QUERIES)
    lengths = _foreign_primes(own, max(least, _SMALLEST), most) or _foreign_primes(own, least, most)
    if not lengths:
        return None
    chosen = lengths[0]
    if plan.train.batch_size == 1:
        batch = 1
    else:
        batches = [p for p in _foreign_primes(own, _SMALLEST, _LARGEST) if p != chosen]
        batch = batches[0]
    tokens = batch * chosen
    if chunks == 1:
        return TellingSizes(batch, chosen, tokens, 0, by_row=by_row)
    for chunk in range(-(-tokens // chunks), tokens):
        rest = tokens - (chunks - 1) * chunk
        if rest <= 1:
            break
        if _foreign(chunk, (*own, batch, chosen, rest)) and _foreign(
            rest, (*own, batch, chosen, chunk)
        ):
            return TellingSizes(batch, chosen, chunk, rest, by_row=by_row)
    return None


def _own_sizes(model: Model, rank: int) -> tuple[int, ...]:
    if not isinstance(model, Architecture):
        sides = {side for p in model.parameters() for side in p.shape}
        fields = (getattr(model, name) for name in getattr(model, "__struct_fields__", ()))
        return tuple(sorted(sides | {n for n in fields if type(n) is int and n > 1}))
    a = model
    found = [value for value in msgspec.structs.astuple(a) if type(value) is int]
    found += [a.query_width, a.key_width, a.heads // max(1, a.kv_heads), rank]
    # Widths of the embedding's partial sums, see trace_devices.
    found += [4 * -(-a.hidden_size // 32) * 32 // 10]
    return tuple(value for value in found if value > 1)


def _foreign_primes(own: Sequence[int], least: int, most: int) -> list[int]:
    """Up to eight primes from `least` to `most` that divide none of `own`."""
    found = []
    for number in range(least, most + 1):
        if all(number % d for d in range(2, int(number**0.5) + 1)) and _foreign(number, own):
            found.append(number)
            if len(found) == 8:
                break
    return found


def _foreign(number: int, own: Sequence[int]) -> bool:
    """Whether the largest prime factor of `number` divides none of `own`."""
    largest, left, factor = 1, number, 2
    while factor * factor <= left:
        while left % factor == 0:
            largest, left = max(largest, factor), left // factor
        factor += 1
    largest = max(largest, left)
    return largest > 7 and all(size % largest for size in own)


def coefficients(
    live: Liveness, sizes: TellingSizes | None, evaluated: TellingSizes | None, kind: str
) -> list[Coefficient]:
    """The coefficient of each storage. Without telling sizes all are constants.

    CUDA's allocator rounds each block up. Only constants are rounded here; for other storages it matters little.
    """
    on_card = kind in ("gpu", "rocm")
    found = []
    for storage in live.storages:
        constant = sizes is None or (
            storage.phase in ("build", "optimizer step") and storage.component != "data"
        )
        own = storage.component or storage.within
        if constant or own in ("weights", "gradients", "optimizer state"):
            coefficient = Coefficient(_ONE, storage.nbytes)
        else:
            telling = evaluated if storage.phase == "evaluation" else sizes
            assert telling is not None
            coefficient = telling.coefficient(storage.nbytes)
        if on_card and coefficient.term == _ONE and coefficient.factor:
            coefficient = Coefficient(_ONE, rounded(coefficient.factor))
        found.append(coefficient)
    return found


def moments(live: Liveness, found: Sequence[Coefficient]) -> dict[str, tuple[AffineMoment, ...]]:
    """By phase, every moment that can be its peak."""
    components = _components(live)
    phases: dict[str, dict[tuple[int, ...], AffineMoment]] = {}
    for phase, levels in _levels(live, found, components):
        total = tuple(map(sum, zip(*levels, strict=True)))
        seen = phases.setdefault(phase, {})
        if total not in seen:
            named = {
                name: tuple(row) for name, row in zip(COMPONENTS, levels, strict=True) if any(row)
            }
            seen[total] = AffineMoment(total=total, components=named)
    return {phase: affine.largest_moments(seen.values()) for phase, seen in phases.items()}


def _levels(
    live: Liveness, found: Sequence[Coefficient], components: Sequence[int]
) -> Iterator[tuple[str, list[list[int]]]]:
    """Live bytes by component and term, at each local maximum and at the start of each phase."""
    levels = [[0] * len(TERMS) for _ in COMPONENTS]
    phase, growing = "build", False
    for event in live.events:
        if isinstance(event, str):
            if growing and phase not in OUTSIDE:
                yield phase, levels
            phase, growing = event, True
            continue
        index = abs(event) - 1
        if event < 0 and growing and phase not in OUTSIDE:
            yield phase, levels
        growing = event > 0
        c = found[index]
        levels[components[index]][c.term] += c.factor if event > 0 else -c.factor


def _components(live: Liveness) -> list[int]:
    """The index in `COMPONENTS` of each storage's component."""
    end = _phases_of_death(live)
    return [
        COMPONENTS.index(_component(storage, end[index]))
        for index, storage in enumerate(live.storages)
    ]


def _phases_of_death(live: Liveness) -> list[str]:
    found = ["end"] * len(live.storages)
    phase = "build"
    for event in live.events:
        if isinstance(event, str):
            phase = event
        elif event < 0:
            found[-event - 1] = phase
    return found


def _component(storage: Storage, end: str) -> str:
    if storage.component is not None:
        return storage.component
    origin = storage.copy_of
    if origin is not None and origin.component in ("weights", "data"):
        return origin.component
    if storage.within is not None:
        return storage.within
    if storage.phase in ("forward", "evaluation"):
        passing = storage.phase == end == "forward"
        return "workspace" if passing else "activations"
    if storage.wide:
        return "logits and loss"
    return "activations" if storage.recomputed else "workspace"
