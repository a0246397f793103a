"""Finds the fastest settings that fit a budget, and the smallest device that is large enough.

Every optimization that the plan's backend can train with may change, except settings the user pinned. Rows per step
and tokens per row never change; micro-batches shrink only if accumulation or more devices compensate. Evaluation batches
are halved only as far as the evaluation is the peak of a plan that does not fit. More devices are used only up to the
number that the caller names. The best combination is chosen by these rules, in order:

1. The whole band fits. Only if no combination does, the estimate alone decides, and the answer is tight.
2. Changes that keep the training result (up to rounding order) come first, and those that the user allowed. The others
   are grouped in classes, from least to most harmful (`HARM`). A set of classes is read as a binary number with the
   worst class as its highest digit. The smallest number for which a plan fits wins.
3. Among those plans, the least seconds per token, the start of the run included.
4. On a tie, the fewest changed settings; then the values listed first in `plan.toggles.optimizations`.

Only combinations whose `training_floor` already exceeds the budget are skipped. For each set of classes, time is
estimated for all other combinations; then memory is estimated from the fastest on until one fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import msgspec

from memconsole.memory.answers.cards import Price
from memconsole.memory.answers.evaluation import OF_EVALUATION, fewer_at_once
from memconsole.memory.answers.places import of_place
from memconsole.memory.answers.space import FREE, HARM, Choice, Space
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.run_time import seconds_per_unit_of_run
from memconsole.memory.seconds import seconds_per_unit
from memconsole.memory.table import MemoryTable
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import Result

NOT_ALLOCATED = "on the device beyond what is allocated"
"""The driver's context, and what the allocator reserves in addition."""
Allowed = frozenset[Result]
NOTHING: Allowed = frozenset()
FASTER_IF = (
    frozenset({Result.ARITHMETIC}),
    frozenset({Result.STATE_8_BITS}),
    frozenset({Result.ARITHMETIC, Result.STATE_8_BITS}),
)
"""What a faster plan may change in the training result, the least harmful first."""
WORTH_TELLING = 1.05
"""The least speed-up that is reported."""
NEARLY = 0.9
"""The share of the largest speed-up with which fewer changes of the result are preferred."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One setting whose value the solution changes."""

    key: str
    label: str
    before: str | int | bool | None
    """None for a setting that may be left out."""
    after: str | int | bool


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest plan that fits. If none fits, the plan that needs the least memory, with the fewest changes."""

    plan: Plan
    fits: bool
    changes: tuple[Change, ...]
    result_changes: tuple[str, ...]
    """How the training result changes, in the words of `Result`."""
    before: MemoryTable
    after: MemoryTable
    time_factor: float
    """Seconds per token, divided by those of the given plan."""
    allowed: tuple[Result, ...]
    """The result classes that may change: those that the user allowed, and those without which nothing fits."""
    only_tight: Plan | None = None
    """A plan that changes the training result less but is only tight: its estimate fits, the high end of its band does
    not. None if there is none."""

    @property
    def floor(self) -> tuple[str, str, int]:
        """The peak phase, the largest part of the device bytes in it, and the bytes of that part: a component, or what is
        not allocated."""
        table, phase = self.after, self.after.peak_phase
        parts = {component.name: component.at(phase) for component in table.components}
        parts[NOT_ALLOCATED] = table.device_bytes - table.peak_bytes
        largest = max(parts, key=parts.__getitem__)
        return phase, largest, parts[largest]


class _Candidate(msgspec.Struct, frozen=True):
    plan: Plan
    seconds_per_unit: float
    changes: int

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key. Time is rounded to nine digits, so that floating-point noise does not decide."""
        return float(f"{self.seconds_per_unit:.9e}"), self.changes


def fit(
    plan: Plan,
    budget: Budget,
    keep: frozenset[str] = frozenset(),
    price: Price = table_of,
    allow: Allowed = NOTHING,
    devices: int | None = None,
) -> Fit:
    """The best plan within `budget` that leaves the settings named in `keep` alone.

    `price` makes the table that decides what fits. The classes in `allow` count as leaving the training result alone.
    `devices` is the most devices that may be used, each with this budget; None leaves the plan's number.
    Raises `PlanError` for a plan that cannot be priced.
    """
    check(plan)
    before = price(plan, budget)
    space = Space(plan, budget, keep, allow, devices=devices)
    tight: tuple[Plan, MemoryTable] | None = None
    for group in space.groups():
        first_tight: tuple[Plan, MemoryTable] | None = None
        waiting = _candidates(space, group, budget)
        while waiting:
            _, number, candidate = heapq.heappop(waiting)
            table = price(candidate.plan, budget)
            if table.verdict is Verdict.FITS:
                only_tight = tight[0] if tight else None
                return _solution(plan, budget, candidate.plan, before, table, allow, only_tight)
            if table.verdict is Verdict.TIGHT and first_tight is None:
                first_tight = candidate.plan, table
            fewer = fewer_at_once(candidate.plan, table, keep)
            if fewer is not None:
                changes = candidate.changes + _first_halving(plan, candidate.plan)
                candidate = _candidate(fewer, changes, budget)
                heapq.heappush(waiting, (candidate.rank, number, candidate))
        tight = tight or first_tight
    solved, table = tight or _least(space, budget, keep, price)
    return _solution(plan, budget, solved, before, table, allow)


_Waiting = tuple[tuple[float, int], int, _Candidate]
"""What a candidate is sorted by (its rank, then its place in the list of combinations), and the candidate."""


def _candidates(space: Space, group: list[Choice], budget: Budget) -> list[_Waiting]:
    """The candidates that may fit, as a heap whose first is the fastest."""
    within = (c for c in group if space.floor(c) <= budget.usable_bytes)
    candidates = (_candidate(*c, budget) for c in space.plans(within))
    heap = [(candidate.rank, number, candidate) for number, candidate in enumerate(candidates)]
    heapq.heapify(heap)
    return heap


def _first_halving(plan: Plan, candidate: Plan) -> bool:
    """Whether `candidate` has the evaluation batch of `plan`, so that halving it changes one more setting."""
    return candidate.train.evaluation_batch_size == plan.train.evaluation_batch_size


class Faster(msgspec.Struct, frozen=True, kw_only=True):
    """A faster plan, which needs more changes of the training result."""

    results: tuple[Result, ...]
    """The changes that it needs."""
    plan: Plan
    speedup: float
    """Seconds per token of the fitted plan, divided by those of this one. The run's start is included."""


def faster(
    plan: Plan,
    budget: Budget,
    found: Fit,
    keep: frozenset[str] = frozenset(),
    price: Price = table_of,
    devices: int | None = None,
) -> Faster | None:
    """The speed-up that 16-bit arithmetic and 8-bit optimizer state would give in addition to the changes of `found`;
    None if it is less than `WORTH_TELLING`, or if `found` does not fit."""
    if not found.fits:
        return None
    seconds = _seconds(found.plan, budget)
    faster_plans: list[Faster] = []
    for results_changed in FASTER_IF:
        if not results_changed - frozenset(found.allowed):
            continue
        other = fit(plan, budget, keep, price, results_changed | frozenset(found.allowed), devices)
        comparable = other.after.verdict is Verdict.FITS or found.after.verdict is Verdict.TIGHT
        if (
            not other.fits
            or not comparable
            or not set(other.allowed) <= results_changed | set(found.allowed)
        ):
            continue
        changed = {row.result_of(row.value(plan), row.value(other.plan)) for row in FREE}
        results = tuple(
            r for r in HARM if r in changed & results_changed and r not in found.allowed
        )
        if results:
            speedup = seconds / _seconds(other.plan, budget)
            faster_plans.append(Faster(results=results, plan=other.plan, speedup=speedup))
    most = max((faster_plan.speedup for faster_plan in faster_plans), default=0.0)
    if most < WORTH_TELLING:
        return None
    return next(
        faster_plan
        for faster_plan in faster_plans
        if faster_plan.speedup >= max(WORTH_TELLING, NEARLY * most)
    )


def _estimated_bytes(table: MemoryTable) -> int:
    return table.device_bytes


def _most_bytes(table: MemoryTable) -> int:
    return table.at_most_bytes


def _least(
    space: Space,
    budget: Budget,
    keep: frozenset[str],
    price: Price,
    size: Callable[[MemoryTable], int] = _estimated_bytes,
    enough: int = -1,
) -> tuple[Plan, MemoryTable]:
    """The plan of the least `size`, and among equals the one that changes least; or the first plan found whose size is
    at most `enough`. Plans that must be larger are skipped. Evaluation batches are halved while they are the peak."""
    best: tuple[tuple[int, int, int], Plan, MemoryTable] | None = None
    choices = [(number, c) for number, group in enumerate(space.groups()) for c in group]
    for number, choice in sorted(choices, key=lambda numbered: space.floor(numbered[1])):
        if best is not None and space.floor(choice) > best[0][0]:
            break
        for changed, changes in space.plans([choice]):
            evaluated: Plan | None = changed
            while evaluated is not None:
                table = price(evaluated, budget)
                need = size(table), changes + (evaluated is not changed), number
                if best is None or need < best[0]:
                    best = need, evaluated, table
                    if need[0] <= enough:
                        return evaluated, table
                evaluated = fewer_at_once(evaluated, table, keep)
    assert best is not None
    return best[1], best[2]


def smallest_device(plan: Plan, devices: Mapping[str, Budget]) -> str | None:
    """The name of the device with the least usable memory on which `plan` fits unchanged."""
    for name, device in _by_size(devices):
        if table_of(planned_on(plan, name), device).verdict is Verdict.FITS:
            return name
    return None


def smallest_device_fitted(
    plan: Plan,
    devices: Mapping[str, Budget],
    keep: frozenset[str] = frozenset(),
    allow: Allowed = NOTHING,
) -> str | None:
    """As `smallest_device`, but optimizations may change if they keep the training result or change only `allow`. A
    plan's memory depends only on the kind of device. Each kind is searched until a plan fits. If none fits, the search
    gives the least bytes of any plan, and smaller devices of that kind are skipped."""
    needs: dict[str, int] = {}
    for name, device in _by_size(devices):
        if needs.get(device.kind, 0) > device.usable_bytes:
            continue
        space = Space(planned_on(plan, name), device, keep, allow, only_allowed=True)
        _, table = _least(space, device, keep, table_of, _most_bytes, enough=device.usable_bytes)
        if table.verdict is Verdict.FITS:
            return name
        needs[device.kind] = table.at_most_bytes
    return None


def planned_on(plan: Plan, device: str) -> Plan:
    """`plan` for the device called `device`."""
    changed: Plan = msgspec.structs.replace(
        plan, device=msgspec.structs.replace(plan.device, name=device)
    )
    return changed


def _by_size(devices: Mapping[str, Budget]) -> list[tuple[str, Budget]]:
    return sorted(devices.items(), key=lambda d: (d[1].usable_bytes, d[1].total_bytes, d[0]))


def _candidate(plan: Plan, changes: int, budget: Budget) -> _Candidate:
    return _Candidate(plan, _seconds(plan, budget), changes)


def _seconds(plan: Plan, budget: Budget) -> float:
    return seconds_per_unit_of_run(plan, model_of(plan), budget)


def _solution(
    plan: Plan,
    budget: Budget,
    solved: Plan,
    before: MemoryTable,
    after: MemoryTable,
    allow: Allowed,
    only_tight: Plan | None = None,
) -> Fit:
    keys = (*((row.key, row.label) for row in FREE), *of_place(plan, solved), *OF_EVALUATION)
    changes = tuple(
        Change(key=key, label=label, before=plans.get(plan, key), after=plans.get(solved, key))
        for key, label in keys
        if plans.get(plan, key) != plans.get(solved, key)
    )
    results = {row.result_of(row.value(plan), row.value(solved)) for row in FREE}
    return Fit(
        plan=solved,
        fits=after.fits,
        changes=changes,
        result_changes=tuple(result.value for result in HARM if result in results),
        before=before,
        after=after,
        time_factor=seconds_per_unit(solved, model_of(solved), budget)
        / seconds_per_unit(plan, model_of(plan), budget),
        allowed=tuple(r for r in HARM if r in allow or (after.fits and r in results)),
        only_tight=only_tight,
    )
