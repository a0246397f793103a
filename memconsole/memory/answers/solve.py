"""Finds the fastest settings that fit a budget, and the smallest device that is large enough.

Every optimization that the plan's backend can train with may change, except settings the user pinned. Rows per step
and tokens per row never change; micro-batches shrink only if accumulation compensates. The best combination is
chosen by these rules, in order:

1. Changes that keep the training result (up to rounding order) come first. The others are grouped in classes, from
   least to most harmful (`HARM`). A set of classes is read as a binary number with the worst class as its highest
   digit. The smallest number for which a plan fits wins.
2. Among those plans, the least seconds per token.
3. On a tie, the fewest changed settings; then the values listed first in `plan.optimizations`.

Only combinations whose `training_floor` already exceeds the budget are skipped. For each set of classes, time is
estimated for all other combinations; then memory is estimated from the fastest on until one fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from memconsole.memory.estimate import model_of, table_of, training_floor
from memconsole.memory.seconds import seconds_per_unit
from memconsole.memory.table import MemoryTable
from memconsole.plan import plan as plans
from memconsole.plan.budget import Budget
from memconsole.plan.check import check
from memconsole.plan.optimization import Optimization, Reach, Result
from memconsole.plan.optimizations import OPTIMIZATIONS, conflict
from memconsole.plan.plan import Plan

Price = Callable[[Plan, Budget], MemoryTable]

HARM = tuple(result for result in Result if result is not Result.SAME)
"""What a change may do to the training result, the least harmful first."""


NOT_OURS = (Result.PREDICTED, Result.DATA)
"""What only the user changes: which steps are trained, and on what."""


def _may_change(row: Optimization) -> bool:
    values = row.values(Plan())
    return not row.size and not any(row.result_of(a, b) in NOT_OURS for a in values for b in values)


FREE = tuple(row for row in OPTIMIZATIONS if _may_change(row))
"""The optimizations that may change. Sizes, the training data and hybrid training never do."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One toggle that the solution sets differently."""

    key: str
    label: str
    before: str | int | bool
    after: str | int | bool


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest plan that fits. If none fits, the plan that needs least memory, with fewest changes."""

    plan: Plan
    fits: bool
    changes: tuple[Change, ...]
    result_changes: tuple[str, ...]
    """How the training result changes, in the words of `Result`."""
    before: MemoryTable
    after: MemoryTable
    time_factor: float
    """Seconds per token, divided by those of the given plan."""

    @property
    def floor(self) -> tuple[str, str, int]:
        """The peak phase, its largest component, and that component's bytes."""
        phase = self.after.peak_phase
        largest = max(self.after.components, key=lambda component: component.at(phase))
        return phase, largest.name, largest.at(phase)


class _Option(msgspec.Struct, frozen=True):
    """One value of one toggle, as settings of the plan's sections."""

    value: Any
    optimize: dict[str, Any]
    train: dict[str, Any]
    changed: bool
    result: int
    """The bit of its result class; 0 for none."""


class _Merged(msgspec.Struct, frozen=True):
    """The settings of several toggles together."""

    optimize: dict[str, Any]
    train: dict[str, Any]
    changes: int
    result: int


class _Candidate(msgspec.Struct, frozen=True):
    plan: Plan
    seconds_per_unit: float
    changes: int

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key. Time is rounded to nine digits, so that floating-point noise does not decide."""
        return float(f"{self.seconds_per_unit:.9e}"), self.changes


def fit(
    plan: Plan, budget: Budget, keep: frozenset[str] = frozenset(), price: Price = table_of
) -> Fit:
    """The best plan within `budget` that leaves the settings named in `keep` alone.

    `price` makes the table that decides what fits. Raises `PlanError` for a plan that cannot be priced.
    """
    check(plan)
    before = price(plan, budget)
    space = _Space(plan, budget, keep)
    for group in space.groups():
        within = (c for c in group if space.floor(c[0]) <= budget.usable_bytes)
        found = sorted((_candidate(*c, budget) for c in space.plans(within)), key=lambda c: c.rank)
        for candidate in found:
            table = price(candidate.plan, budget)
            if table.fits:
                return _solution(plan, budget, candidate.plan, before, table)
    leanest, table = _least(space, budget, price)
    return _solution(plan, budget, leanest, before, table)


def least_bytes(
    plan: Plan, budget: Budget, keep: frozenset[str] = frozenset(), price: Price = table_of
) -> int:
    """The least device bytes that any allowed plan needs on the device of `budget`."""
    return _least(_Space(plan, budget, keep), budget, price)[1].device_bytes


def _least(
    space: _Space, budget: Budget, price: Price, enough: int = -1
) -> tuple[Plan, MemoryTable]:
    """The plan that needs least memory, and among equals changes least; or the first plan found that needs at most
    `enough` bytes. Plans that must need more are skipped."""
    best: tuple[tuple[int, int, int], Plan, MemoryTable] | None = None
    pairs = [(number, pair) for number, group in enumerate(space.groups()) for pair in group]
    for number, pair in sorted(pairs, key=lambda n: space.floor(n[1][0])):
        if best is not None and space.floor(pair[0]) > best[0][0]:
            break
        for changed, changes in space.plans([pair]):
            table = price(changed, budget)
            need = table.device_bytes, changes, number
            if best is None or need < best[0]:
                best = need, changed, table
                if table.device_bytes <= enough:
                    return changed, table
    assert best is not None
    return best[1], best[2]


def smallest_device(
    plan: Plan, devices: Mapping[str, Budget], price: Price = table_of
) -> str | None:
    """The name of the device with the least usable memory on which `plan` fits unchanged."""
    return next(
        (name for name, device in _by_size(devices) if price(planned_on(plan, name), device).fits),
        None,
    )


def smallest_device_fitted(
    plan: Plan,
    devices: Mapping[str, Budget],
    keep: frozenset[str] = frozenset(),
    price: Price = table_of,
) -> str | None:
    """The same, but optimizations may change as in `fit`. A plan's memory depends only on the kind of device. Each kind
    is searched until a plan fits; a complete search gives the least bytes, and smaller devices of it are skipped."""
    needs: dict[str, int] = {}
    for name, device in _by_size(devices):
        if needs.get(device.kind, 0) > device.usable_bytes:
            continue
        space = _Space(planned_on(plan, name), device, keep)
        _, table = _least(space, device, price, enough=device.usable_bytes)
        if table.device_bytes <= device.usable_bytes:
            return name
        needs[device.kind] = table.device_bytes
    return None


def planned_on(plan: Plan, device: str) -> Plan:
    """`plan` for the device called `device`."""
    changed: Plan = msgspec.structs.replace(
        plan, device=msgspec.structs.replace(plan.device, name=device)
    )
    return changed


def _by_size(devices: Mapping[str, Budget]) -> list[tuple[str, Budget]]:
    return sorted(devices.items(), key=lambda d: (d[1].usable_bytes, d[1].total_bytes, d[0]))


def _is_last(row: Optimization) -> bool:
    """Whether an optimization changes only the update, its state or the heap. Those are combined last."""
    return row.reach in (Reach.UPDATE, Reach.HEAP)


class _Space:
    """Every combination of the toggles' values: a first choice for most toggles, and a last one for update toggles
    and the heap."""

    def __init__(self, plan: Plan, budget: Budget, keep: frozenset[str]) -> None:
        self._plan = plan
        self._budget = budget
        rows = [row for row in FREE if row.reach is not Reach.HEAP or budget.kind == "cpu"]
        first = [_options(plan, row, keep) for row in rows if not _is_last(row)]
        last = [_options(plan, row, keep) for row in rows if _is_last(row)]
        self._first = [_merged(chosen) for chosen in itertools.product(*first)]
        self._last = [_merged(chosen) for chosen in itertools.product(*last)]
        self._floors: dict[int, int] = {}

    def groups(self) -> Iterator[list[tuple[int, int]]]:
        """The combinations grouped by the result classes they change, as index pairs (first choice, last choice)."""
        first, last = _by_result(self._first), _by_result(self._last)
        for number in sorted({a | b for a in first for b in last}):
            found = [(a, b) for a in first for b in last if a | b == number]
            yield sorted(p for a, b in found for p in itertools.product(first[a], last[b]))

    def plans(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[Plan, int]]:
        """The plans of those `pairs` that have no conflicting settings, each with its number of changes."""
        for a, b in pairs:
            changed = _combined(self._plan, self._first[a], self._last[b])
            if conflict(changed) is None:
                yield changed, self._first[a].changes + self._last[b].changes

    def floor(self, first: int) -> int:
        """A lower limit of the device bytes of all plans with this first choice."""
        found = self._floors.get(first)
        if found is None:
            found = training_floor(_combined(self._plan, self._first[first]), self._budget)
            self._floors[first] = found
        return found


def _by_result(choices: Sequence[_Merged]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for n, choice in enumerate(choices):
        found.setdefault(choice.result, []).append(n)
    return found


def _options(plan: Plan, row: Optimization, keep: frozenset[str]) -> list[_Option]:
    """The trainable values of one toggle that do not change a pinned setting."""
    present, values = row.value(plan), row.values(plan)
    options = []
    for value in values if present in values else (present, *values):
        changes = row.settings_for(plan, value)
        pinned = [key for key in changes if key in keep]
        if any(changes[key] != plans.get(plan, key) for key in pinned):
            continue
        if row.refusal(plan, value) is not None and not (value == present and pinned):
            continue
        options.append(
            _Option(
                value,
                _section(changes, "optimize"),
                _section(changes, "train"),
                value != present,
                _bit(row.result_of(present, value)),
            )
        )
    return options


def _bit(result: Result) -> int:
    """The bit of a result class in `HARM`; 0 if the result stays the same."""
    return 0 if result is Result.SAME else 1 << HARM.index(result)


def _section(changes: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.partition(".")[2]: v for key, v in changes.items() if key.startswith(f"{name}.")}


def _merged(options: Iterable[_Option]) -> _Merged:
    optimize: dict[str, Any] = {}
    train: dict[str, Any] = {}
    count = result = 0
    for option in options:
        result |= option.result
        if option.changed:
            optimize.update(option.optimize)
            train.update(option.train)
            count += 1
    return _Merged(optimize, train, count, result)


def _combined(plan: Plan, *choices: _Merged) -> Plan:
    optimize = {key: value for choice in choices for key, value in choice.optimize.items()}
    train = {key: value for choice in choices for key, value in choice.train.items()}
    changed: Plan = msgspec.structs.replace(
        plan,
        optimize=msgspec.structs.replace(plan.optimize, **optimize) if optimize else plan.optimize,
        train=msgspec.structs.replace(plan.train, **train) if train else plan.train,
    )
    return changed


def _candidate(plan: Plan, changes: int, budget: Budget) -> _Candidate:
    return _Candidate(plan, seconds_per_unit(plan, model_of(plan), budget), changes)


def _solution(
    plan: Plan, budget: Budget, solved: Plan, before: MemoryTable, after: MemoryTable
) -> Fit:
    changes = tuple(
        Change(key=row.key, label=row.label, before=row.value(plan), after=row.value(solved))
        for row in FREE
        if row.value(plan) != row.value(solved)
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
    )
