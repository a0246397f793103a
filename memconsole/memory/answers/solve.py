"""The settings that fit a budget at the least estimated time, and the smallest device that would do.

What may change is every optimization that the plan's backend really trains with, but never what the person
pinned, and never a size: rows per step and tokens per row stay, micro-batches shrink only where accumulation
makes up for it. Which combination wins, in this order:

1. Changes that leave the training result alone (up to rounding order) come before those that do not. The
   latter are allowed one class at a time, the least harmful first, `HARM`: a set of classes is read
   as a binary number, the worst class its highest digit, and the smallest number with a plan that fits wins.
2. Among those plans, the least seconds per token.
3. Equal there, the fewest changed settings; then the values listed first in `plan.optimizations`.

No combination is left out but those of which `training_floor` alone is beyond the budget: time is estimated for
the others of one set, memory from the fastest on until one fits.
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
"""What a change may do to the training result, the least first."""


def _may_change(row: Optimization) -> bool:
    values = row.values(Plan())
    return not row.size and all(
        row.result_of(a, b) is not Result.DATA for a in values for b in values
    )


FREE = tuple(row for row in OPTIMIZATIONS if _may_change(row))
"""The rows that may change. Never a size, nor what is trained on."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One toggle that the solution sets differently."""

    key: str
    label: str
    before: str | int | bool
    after: str | int | bool


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest plan that fits; where none does, the one that needs least, with fewest changes."""

    plan: Plan
    fits: bool
    changes: tuple[Change, ...]
    result_changes: tuple[str, ...]
    """What the training result is changed by, in the words of `Result`."""
    before: MemoryTable
    after: MemoryTable
    time_factor: float
    """Seconds per token over those of the plan that was given."""

    @property
    def floor(self) -> tuple[str, str, int]:
        """Phase of the peak, its largest component, and that component's bytes."""
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
        """Nine digits of the time: what floating point leaves beyond is no difference."""
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
    """Device bytes of the plan that needs least on the device of `budget`."""
    return _least(_Space(plan, budget, keep), budget, price)[1].device_bytes


def _least(
    space: _Space, budget: Budget, price: Price, enough: int = -1
) -> tuple[Plan, MemoryTable]:
    """Of all plans the one that needs least, then changes least, or the first found that needs no more than
    `enough`; skipping what must need more."""
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
    """The name of the device with least usable memory on which `plan` fits as it is."""
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
    """The same if the optimizations may change as in `fit`. What a plan needs depends on the kind of device
    alone: a kind is searched until something fits, or once to the end for what it needs at least."""
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
    """What changes nothing but the update and its state is tried last, where the rest leaves room."""
    return row.reach is Reach.UPDATE


class _Space:
    """Every combination of the toggles' values: a choice of those that are not last, and one of the last."""

    def __init__(self, plan: Plan, budget: Budget, keep: frozenset[str]) -> None:
        self._plan = plan
        self._budget = budget
        first = [_options(plan, row, keep) for row in FREE if not _is_last(row)]
        last = [_options(plan, row, keep) for row in FREE if _is_last(row)]
        self._first = [_merged(chosen) for chosen in itertools.product(*first)]
        self._last = [_merged(chosen) for chosen in itertools.product(*last)]
        self._floors: dict[int, int] = {}

    def groups(self) -> Iterator[list[tuple[int, int]]]:
        """The combinations by the set of result classes they change, as indices of both choices."""
        first, last = _by_result(self._first), _by_result(self._last)
        for number in sorted({a | b for a in first for b in last}):
            found = [(a, b) for a in first for b in last if a | b == number]
            yield sorted(p for a, b in found for p in itertools.product(first[a], last[b]))

    def plans(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[Plan, int]]:
        """Those of `pairs` whose settings go together, with their numbers of changes."""
        for a, b in pairs:
            changed = _combined(self._plan, self._first[a], self._last[b])
            if conflict(changed) is None:
                yield changed, self._first[a].changes + self._last[b].changes

    def floor(self, first: int) -> int:
        """Device bytes that a plan with one of the first choices needs at the very least."""
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
    """The values of one toggle that can be trained and that no pin forbids."""
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
    """The digit of a class among those that harm; 0 where the result stays the same."""
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
