"""What to change in a plan that does not fit, and the largest batch or sequence that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from memconsole.memory.activations import jax_chunks, torch_timeline
from memconsole.memory.answers.cards import Price
from memconsole.memory.answers.correction import Correction, OutOfMemoryRun, correction
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.seconds import seconds_per_unit
from memconsole.memory.table import MemoryTable
from memconsole.memory.verdict import Verdict
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.catalog.windows import window_sizes
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.sections.model import LEAST_WIDTH
from memconsole.plan.toggles.optimization import Optimization, Result
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS
from memconsole.units import value_word

SMALLER_MODEL = "model.target_params"
"""The only remedy that is not an optimization."""
_RANKS = {row.key: row.remedy.rank for row in OPTIMIZATIONS if row.remedy} | {SMALLER_MODEL: 80}
ORDER = tuple(sorted(_RANKS, key=_RANKS.__getitem__))
"""The order in which to try remedies: by each optimization's rank, with a smaller model after shorter rows."""

LARGEST_BATCH = 65_536
CHUNK_TOKENS = max(torch_timeline.CHUNK_TOKENS, jax_chunks.CHUNK_TOKENS)
"""Most tokens per chunk of a chunked loss, over all backends."""
SCORES_SLACK = 256 * 2**20
"""Upper limit of the bytes by which chunks of attention scores shrink when a micro-batch grows by one row: eight times
the largest chunk."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a plan that lowers its memory."""

    key: str
    """One of `ORDER`."""
    changes: dict[str, Any]
    """Settings for `memconsole.plan.plan.replace`."""
    label: str
    result: str
    """What it changes in the training result; empty if nothing."""
    saves_bytes: int
    """Device bytes saved. On a CPU, if those are not smaller, host bytes saved."""
    verdict: Verdict
    """Whether this change alone makes the plan fit."""
    fits: bool
    """Whether the estimate fits with this change alone, whatever its band."""
    time_factor: float


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest size that works."""

    size: int
    verdict: Verdict
    """`TIGHT` if not even the smallest size leaves room for the band."""
    all_positions: bool = False
    """Whether rows of this length use all of the model's positions, so that memory is not what limits it."""


class _Way(msgspec.Struct, frozen=True):
    """One way to apply a remedy."""

    changes: dict[str, Any]
    label: str
    result: Result
    along_costs: str = ""

    @property
    def costs(self) -> str:
        """What it changes in the training result."""
        return ", ".join(words for words in (self.result.value, self.along_costs) if words)


def remedies(
    plan: Plan, budget: Budget, died: OutOfMemoryRun | None = None, price: Price = table_of
) -> tuple[Remedy, ...]:
    """Every change that lowers this plan's memory and that its backend can train, in the order to try.

    `died` is a run of this plan that ran out of memory; its measurements correct the tables that `price` makes.
    """
    before = price(plan, budget)
    by = correction(before, died)
    fits = died is None and by.verdict(before) is Verdict.FITS
    found: list[Remedy] = []
    for key in ORDER:
        ways = _smaller_models(plan) if key == SMALLER_MODEL else _ways(plan, BY_KEY[key])
        helpful = [
            (way.result, r) for way in ways if (r := _remedy(plan, before, by, key, way, price))
        ]
        if helpful:
            found.append(_best(helpful, enough=not fits))
    return tuple(found)


def _best(helpful: list[tuple[Result, Remedy]], *, enough: bool) -> Remedy:
    """The best way to apply one remedy: the least harmful to the training result. Among equals, with `enough` the
    smallest saving that fits with its band, otherwise the largest saving."""
    harm = list(Result)
    fitting = [way for way in helpful if enough and way[1].verdict is Verdict.FITS]
    sign = 1 if fitting else -1
    return min(
        fitting or helpful,
        key=lambda way: (harm.index(way[0]), sign * way[1].saves_bytes, way[1].time_factor),
    )[1]


def _smaller_models(plan: Plan) -> list[_Way]:
    """Smaller sizes of a sized family, or narrower regressors."""
    model = model_of(plan)
    if isinstance(model, Regressor):
        smaller = (model.hidden_size // n for n in (2, 4, 8))
        widths = [w for w in smaller if w >= LEAST_WIDTH and not w % model.heads]
        return [_Way({"model.hidden_size": w}, f"a width of {w:,}", Result.MODEL) for w in widths]
    size = plan.model.target_params
    if size is None:
        return []
    sizes = [max(100_000, size // n) for n in (2, 4, 8)]
    return [_Way({SMALLER_MODEL: n}, f"a model of {n:,} parameters", Result.MODEL) for n in sizes]


def _ways(plan: Plan, row: Optimization) -> list[_Way]:
    """The values of one optimization that are offered and that the plan's backend trains."""
    rule, present = row.remedy, row.value(plan)
    assert rule is not None
    along = {key: value for key, value in rule.along.items() if plans.get(plan, key) != value}
    return [
        _Way(
            {**row.settings_for(plan, value), **along},
            f"{row.label}: {value_word(value)}",
            row.result_of(present, value),
            rule.along_costs if along else "",
        )
        for value in (rule.values or row.values)(plan)
        if value != present and row.refusal(plan, value) is None
    ]


def _remedy(
    plan: Plan, before: MemoryTable, by: Correction, key: str, way: _Way, price: Price
) -> Remedy | None:
    budget = before.budget
    try:
        changed = plans.replace(plan, way.changes)
        check(changed)
        after = price(changed, budget)
    except PlanError:
        return None
    saves = by.device_bytes(before) - by.device_bytes(after)
    if saves <= 0 and budget.kind == "cpu":
        saves = before.host_bytes - after.host_bytes
    if saves <= 0:
        return None
    now = seconds_per_unit(plan, model_of(plan), budget)
    then = seconds_per_unit(changed, model_of(changed), budget)
    return Remedy(
        key=key,
        changes=way.changes,
        label=way.label,
        result=way.costs,
        saves_bytes=saves,
        verdict=(verdict := by.verdict(after)),
        fits=verdict is not Verdict.DOES_NOT_FIT,
        time_factor=then / now,
    )


def largest_micro_batch(plan: Plan, budget: Budget, price: Price = table_of) -> Largest | None:
    """The most rows per micro-batch that fit with other settings unchanged; None if not even the fewest fit."""
    sizes = range(plan.rows_together, LARGEST_BATCH + 1, plan.rows_together)
    return _largest(plan, budget, "train.batch_size", sizes, _least_beyond_batch, price)


def largest_sequence_length(plan: Plan, budget: Budget, price: Price = table_of) -> Largest | None:
    """The longest rows that fit, in multiples of 8 tokens and within the model's positions; None if no length fits.
    Rows are at least as long as `data.stride`."""
    shortest = -(-max(8, plan.data.stride or 8) // 8) * 8
    sizes = range(shortest, _longest(plan) + 1, 8)
    found = _largest(plan, budget, "data.sequence_length", sizes, _least_beyond_length, price)
    if found is None or found.size < sizes[-1]:
        return found
    return msgspec.structs.replace(found, all_positions=True)


def _longest(plan: Plan) -> int:
    """The most positions of a row: those of the model, or of the windows that a regressor reads."""
    model = model_of(plan)
    if not isinstance(model, Regressor):
        return model.max_positions
    try:
        windows = window_sizes(catalog.dataset(plan).where)
    except PlanError:
        windows = None
    return model.max_positions if windows is None else min(model.max_positions, windows.length)


def _least_beyond_batch(bytes_: int, plan: Plan) -> int:
    """A lower limit of the bytes of all larger micro-batches than the plan's, which needs `bytes_`. Memory is not
    monotone in the micro-batch size.

    Logits and scores are computed in equal chunks. When one more chunk is needed, they shrink by at most one part in
    (number of chunks + 1). At least half always remains.
    """
    chunks = plan.micro_batch_tokens // CHUNK_TOKENS
    return max(bytes_ // 2, bytes_ * chunks // (chunks + 1) - SCORES_SLACK)


def _least_beyond_length(bytes_: int, plan: Plan) -> int:
    """A lower limit of the bytes of all longer rows than the plan's, which needs `bytes_`. The length also changes
    whether masks are padded."""
    return bytes_ // 2


def _largest(
    plan: Plan,
    budget: Budget,
    key: str,
    sizes: range,
    least_beyond: Callable[[int, Plan], int],
    price: Price,
) -> Largest | None:
    """The largest of `sizes` whose whole band fits, or else the largest whose estimate does. Bisection finds a size
    above which nothing can fit; from there every size is tried in descending order."""

    def priced(size: int) -> tuple[MemoryTable, Plan]:
        changed = plans.replace(plan, {key: size})
        return price(changed, budget), changed

    if not sizes:
        return None
    low, high = 0, len(sizes)  # sizes[high:] cannot fit
    while high - low > 1:
        middle = (low + high) // 2
        table, changed = priced(sizes[middle])
        if least_beyond(table.device_bytes, changed) > budget.usable_bytes:
            high = middle
        else:
            low = middle
    tight = None
    for size in reversed(sizes[:high]):
        verdict = priced(size)[0].verdict
        if verdict is Verdict.FITS:
            return Largest(size=size, verdict=verdict)
        if verdict is Verdict.TIGHT and tight is None:
            tight = Largest(size=size, verdict=verdict)
    return tight
