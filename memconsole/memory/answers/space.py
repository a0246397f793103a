"""The search space of `memconsole fit`: every combination of a place (number of devices and sharding) and of values of the
optimizations, grouped by how it changes the training result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from memconsole.memory.answers.places import SHARDING, moves, places
from memconsole.memory.estimate import training_floor
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import Optimization, Reach, Result
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS, conflict

HARM = tuple(result for result in Result if result is not Result.SAME)
"""What a change may do to the training result, the least harmful first."""


NOT_OURS = (Result.PREDICTED, Result.DATA)
"""Result classes that a search never chooses, because they change which steps are trained and on which data."""


def _may_change(row: Optimization) -> bool:
    values = row.values(Plan())
    return not row.size and not any(row.result_of(a, b) in NOT_OURS for a in values for b in values)


FREE = tuple(row for row in OPTIMIZATIONS if _may_change(row))
"""The optimizations that may change. Sizes, the training data and hybrid training never do."""


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


def _is_last(row: Optimization) -> bool:
    """Whether an optimization changes only the update, its state or the heap. Those are combined last."""
    return row.reach in (Reach.UPDATE, Reach.HEAP)


class Choice(NamedTuple):
    """One combination, as indices of a place, a first choice and a last one."""

    place: int
    first: int
    last: int


class Space:
    """Every combination of a place and the toggles' values: a first choice for most toggles, and a last one for update
    toggles and the heap."""

    def __init__(
        self,
        plan: Plan,
        budget: Budget,
        keep: frozenset[str],
        allow: frozenset[Result] = frozenset(),
        *,
        only_allowed: bool = False,
        devices: int | None = None,
    ) -> None:
        """Changes of the result that are in `allow` count as no change; with `only_allowed`, combinations with other
        changes are left out. `devices` is the most devices that may be used; None keeps the plan's number."""
        self._harm = ~sum(_bit(result) for result in allow)
        self._only_allowed = only_allowed
        found = places(plan, keep, devices)
        self._places = [_Place(p, budget, keep, moves(plan, p)) for p in found]

    def groups(self) -> Iterator[list[Choice]]:
        """The combinations grouped by the result classes they change."""
        harm = self._harm
        for number in sorted({n for place in self._places for n in place.results(harm)}):
            if number and self._only_allowed:
                return
            yield [
                Choice(n, first, last)
                for n, place in enumerate(self._places)
                for first, last in place.pairs(number, harm)
            ]

    def plans(self, choices: Iterable[Choice]) -> Iterator[tuple[Plan, int]]:
        """The plans of those `choices` that have no conflicting settings, each with its number of changes."""
        for choice in choices:
            changed, changes = self._places[choice.place].plan(choice.first, choice.last)
            if conflict(changed) is None:
                yield changed, changes

    def floor(self, choice: Choice) -> int:
        """A lower limit of the device bytes of all plans with this place and first choice."""
        return self._places[choice.place].floor(choice.first)


class _Place:
    """The combinations on one number of devices."""

    def __init__(self, plan: Plan, budget: Budget, keep: frozenset[str], moved: int) -> None:
        self._plan, self._budget, self._moved = plan, budget, moved
        rows = [row for row in FREE if row.key != SHARDING]
        rows = [row for row in rows if row.reach is not Reach.HEAP or budget.kind == "cpu"]
        first = [_options(plan, row, keep, budget.kind) for row in rows if not _is_last(row)]
        last = [_options(plan, row, keep, budget.kind) for row in rows if _is_last(row)]
        self._first = [_merged(chosen) for chosen in itertools.product(*first)]
        self._last = [_merged(chosen) for chosen in itertools.product(*last)]
        self._by_first, self._by_last = _by_result(self._first), _by_result(self._last)
        self._floors: dict[int, int] = {}

    def results(self, harm: int) -> set[int]:
        """The result classes in `harm` that the combinations change, as one number each."""
        return {(a | b) & harm for a in self._by_first for b in self._by_last}

    def pairs(self, number: int, harm: int) -> list[tuple[int, int]]:
        """The combinations of one of these numbers, as (first choice, last choice)."""
        first, last = self._by_first, self._by_last
        found = [(a, b) for a in first for b in last if (a | b) & harm == number]
        return sorted(p for a, b in found for p in itertools.product(first[a], last[b]))

    def plan(self, first: int, last: int) -> tuple[Plan, int]:
        one, other = self._first[first], self._last[last]
        changes = self._moved + one.changes + other.changes
        return _combined(self._plan, one, other), changes

    def floor(self, first: int) -> int:
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


def _options(plan: Plan, row: Optimization, keep: frozenset[str], kind: str) -> list[_Option]:
    """The values of one toggle that a kind of device can train and that do not change a pinned setting."""
    present, values = row.value(plan), row.tried(plan)
    options = []
    for value in values if present in values else (present, *values):
        changes = row.settings_for(plan, value)
        pinned = [key for key in changes if key in keep]
        if any(changes[key] != plans.get(plan, key) for key in pinned):
            continue
        if row.refusal(plan, value, kind) is not None and not (value == present and pinned):
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
