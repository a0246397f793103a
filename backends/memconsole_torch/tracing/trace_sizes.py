"""Chooses the sizes at which a step is traced, and finds how bytes depend on them.

A step is traced at sizes that have a prime factor which divides none of the model's own sizes. The bytes of a storage
then show which of these sizes they are a multiple of, and in which power.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memconsole.memory.activations.kernels import CAPPED_QUERIES, attends_in_parts
from memconsole.memory.exact import affine
from memconsole.memory.exact.affine import TERMS
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, replace
from memconsole_torch.tracing.trace_step import TracedSizes

ONE = TERMS.index("1")
_TERM = {
    (0, 0): ONE,
    (0, 1): TERMS.index("S"),
    (1, 1): TERMS.index("B·S"),
    (0, 2): TERMS.index("S²"),
    (1, 2): TERMS.index("B·S²"),
    (1, 0): TERMS.index("B"),
}
"""The term, by how often micro-batch size and sequence length divide the bytes."""
_CHUNK, _REST = TERMS.index("chunk"), TERMS.index("rest")
_SMALLEST = 37
"""The least size to trace at, if the plan allows it."""
_LARGEST = 4000
"""The largest size to trace at, in addition to a sliding window."""


class Coefficient(msgspec.Struct, frozen=True):
    """Bytes of a storage: `factor` times the value of a term."""

    term: int
    factor: int


class AmbiguousSizeError(ValueError):
    """The bytes of a storage are not a multiple of a single term, so what they depend on is unknown."""


class DistinctSizes(TracedSizes):
    """Sizes to trace at, which the bytes of a storage reveal, and the rows of the last loss chunk (0 if there is only one chunk).

    `by_row`: some arrays have a size per row that does not depend on the length.
    """

    def __init__(
        self, batch: int, length: int, chunk: int, rest: int, *, by_row: bool = False
    ) -> None:
        super().__init__(batch, length, chunk)
        self.rest, self.by_row = rest, by_row

    def coefficient(self, nbytes: int) -> Coefficient:
        """What `nbytes` is proportional to. Raises `AmbiguousSizeError`."""
        for rows, term in ((self.chunk, _CHUNK), (self.rest, _REST)):
            if self.rest and nbytes and nbytes % rows == 0:
                return Coefficient(term, nbytes // rows)
        factor, powers = nbytes, [0, 0]
        for position, size in enumerate((self.batch, self.length)):
            while size > 1 and factor and factor % size == 0:
                factor //= size
                powers[position] += 1
        if self.batch == 1 and powers[1]:
            powers[0] = 1 if powers[1] == 1 else 0
        of_batch_and_length = (powers[0], powers[1])
        known = of_batch_and_length in _TERM and (of_batch_and_length != (1, 0) or self.by_row)
        if nbytes and not known:
            raise AmbiguousSizeError(f"{nbytes} bytes at {self.batch} x {self.length}")
        return Coefficient(_TERM[of_batch_and_length], factor)


def evaluating(plan: Plan) -> Plan:
    """`plan` with its evaluation batch size as the micro-batch size."""
    return replace(plan, {"train.batch_size": plan.evaluation_batch})


def has_table_of_positions(model: Model) -> bool:
    """Whether the model has a table of positions, so that rows cannot be longer than `max_positions`."""
    return not isinstance(model, Architecture) or model.positions == "learned"


def distinct_sizes(plan: Plan, model: Model) -> DistinctSizes | None:
    """Sizes in the plan's own regime with prime factors that divide none of the model's sizes; None if there are none.
    There are none for recommenders, whose loss and evaluation run in chunks of other sizes, for a tiled MLP, which runs in
    others too, nor for DPO, whose rows are an even number."""
    if isinstance(model, Recommender) or plan.rows_together > 1 or plan.optimize.tiled_mlp:
        return None
    length, text = plan.data.sequence_length, isinstance(model, Architecture)
    own = _model_sizes(model, plan.optimize.lora_rank)
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
    lengths = _distinct_primes(own, max(least, _SMALLEST), most) or _distinct_primes(
        own, least, most
    )
    if not lengths:
        return None
    traced_length = lengths[0]
    if plan.train.batch_size == 1:
        batch = 1
    else:
        batches = [p for p in _distinct_primes(own, _SMALLEST, _LARGEST) if p != traced_length]
        batch = batches[0]
    tokens = batch * traced_length
    if chunks == 1:
        return DistinctSizes(batch, traced_length, tokens, 0, by_row=by_row)
    for chunk in range(-(-tokens // chunks), tokens):
        rest = tokens - (chunks - 1) * chunk
        if rest <= 1:
            break
        if _is_distinct(chunk, (*own, batch, traced_length, rest)) and _is_distinct(
            rest, (*own, batch, traced_length, chunk)
        ):
            return DistinctSizes(batch, traced_length, chunk, rest, by_row=by_row)
    return None


def _model_sizes(model: Model, rank: int) -> tuple[int, ...]:
    """The sizes above 1 that bytes can be multiples of besides those that are traced; `rank` is that of adapters."""
    if not isinstance(model, Architecture):
        sides = {side for p in model.parameters() for side in p.shape}
        fields = (getattr(model, name) for name in getattr(model, "__struct_fields__", ()))
        return tuple(sorted(sides | {n for n in fields if type(n) is int and n > 1}))
    a = model
    sizes = [value for value in msgspec.structs.astuple(a) if type(value) is int]
    sizes += [a.query_width, a.key_width, a.heads // max(1, a.kv_heads), rank]
    # Widths of the embedding's partial sums, see trace_operators.
    sizes += [4 * -(-a.hidden_size // 32) * 32 // 10]
    return tuple(value for value in sizes if value > 1)


def _distinct_primes(own: Sequence[int], least: int, most: int) -> list[int]:
    """Up to eight primes from `least` to `most` that divide none of `own`."""
    primes = []
    for number in range(least, most + 1):
        if all(number % d for d in range(2, int(number**0.5) + 1)) and _is_distinct(number, own):
            primes.append(number)
            if len(primes) == 8:
                break
    return primes


def _is_distinct(number: int, own: Sequence[int]) -> bool:
    """Whether the largest prime factor of `number` divides none of `own`."""
    largest, left, factor = 1, number, 2
    while factor * factor <= left:
        while left % factor == 0:
            largest, left = max(largest, factor), left // factor
        factor += 1
    largest = max(largest, left)
    return largest > 7 and all(size % largest for size in own)
