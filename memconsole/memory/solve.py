"""The settings that fit a budget at the least estimated time, and the smallest device that would do.

What may change is every optimization that the plan's backend really trains with, but never what the person
pinned, and never a size: rows per step and tokens per row stay, micro-batches shrink only where accumulation
makes up for it. Which combination wins, in this order:

1. Changes that leave the training result alone (up to rounding order) come before those that do not. The
   latter are allowed one class at a time, the least harmful first, `RESULT_CLASSES`: a set of classes is read
   as a binary number, the worst class its highest digit, and the smallest number with a plan that fits wins.
2. Among those plans, the least seconds per token.
3. Equal there, the fewest changed settings; then the values listed first in `plan.optimizations`.

Every combination is considered: time is estimated for all of one set, memory from the fastest on until one fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from memconsole.memory.estimate import architecture_of, table_of
from memconsole.memory.seconds import step_seconds
from memconsole.memory.table import Budget, MemoryTable
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.conflicts import conflict
from memconsole.plan.optimizations import OPTIMIZATIONS, Optimization
from memconsole.plan.plan import Plan

Price = Callable[[Plan, Budget], MemoryTable]

RESULT_CLASSES = (
    "16-bit arithmetic",
    "8-bit optimizer state",
    "another optimizer",
    "quantized frozen weights",
    "adapters instead of the whole model",
)
"""What a change may do to the training result, the least first."""

SIZES = ("train.batch_size", "data.sequence_length", "data.streaming", "data.shuffle_buffer")
"""Never changed: they say what is trained on, or cost host memory alone."""


def result_class(key: str, before: Any, after: Any) -> int | None:
    """The index in `RESULT_CLASSES` of a changed toggle; None if the result stays the same."""
    if before == after:
        return None
    if key == "optimize.precision":
        return 0
    if key == "optimize.optimizer":
        return 1 if {before, after} == {"adamw", "adamw-8bit"} else 2
    if key == "optimize.base_storage":
        return 3
    return 4 if key == "optimize.lora_rank" else None


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
    """Of `RESULT_CLASSES`, what the training result is changed by."""
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


class _Candidate(msgspec.Struct, frozen=True):
    plan: Plan
    seconds_per_token: float
    changes: int

    @property
    def rank(self) -> tuple[float, int]:
        """Nine digits of the time: what floating point leaves beyond is no difference."""
        return float(f"{self.seconds_per_token:.9e}"), self.changes


def fit(
    plan: Plan, budget: Budget, keep: frozenset[str] = frozenset(), price: Price = table_of
) -> Fit:
    """The best plan within `budget` that leaves the settings named in `keep` alone.

    `price` makes the table that decides what fits. Raises `PlanError` for a plan that cannot be priced.
    """
    check(plan)
    before = price(plan, budget)
    least: tuple[tuple[int, int], Plan, MemoryTable] | None = None
    for group in _groups(plan, keep):
        found = sorted((_candidate(*c, budget) for c in group), key=lambda c: c.rank)
        for candidate in found:
            table = price(candidate.plan, budget)
            if table.fits:
                return _solution(plan, budget, candidate.plan, before, table)
            need = table.device_bytes, candidate.changes
            if least is None or need < least[0]:
                least = need, candidate.plan, table
    assert least is not None
    return _solution(plan, budget, least[1], before, least[2])


def least_bytes(
    plan: Plan, budget: Budget, keep: frozenset[str] = frozenset(), price: Price = table_of
) -> int:
    """Device bytes of the plan that needs least on the device of `budget`."""
    groups = _groups(plan, keep)
    return min(price(changed, budget).device_bytes for group in groups for changed, _ in group)


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
    alone, so that each kind is searched once."""
    needs: dict[str, int] = {}
    for name, device in _by_size(devices):
        if device.kind not in needs:
            needs[device.kind] = least_bytes(planned_on(plan, name), device, keep, price)
        if needs[device.kind] <= device.usable_bytes:
            return name
    return None


def planned_on(plan: Plan, device: str) -> Plan:
    """`plan` for the device called `device`."""
    changed: Plan = msgspec.structs.replace(
        plan, device=msgspec.structs.replace(plan.device, name=device)
    )
    return changed


def _by_size(devices: Mapping[str, Budget]) -> list[tuple[str, Budget]]:
    return sorted(devices.items(), key=lambda d: (d[1].usable_bytes, d[1].total_bytes, d[0]))


def _groups(plan: Plan, keep: frozenset[str]) -> Iterator[Iterable[tuple[Plan, int]]]:
    """Every combination with its number of changes, by the set of result classes it changes."""
    rows = [_options(plan, row, keep) for row in OPTIMIZATIONS if row.key not in SIZES]
    altering = [options for options in rows if any(o.result for o in options)]
    harmless = [options for options in rows if not any(o.result for o in options)]
    sets: dict[int, list[tuple[_Option, ...]]] = {}
    for chosen in itertools.product(*altering):
        number = 0
        for option in chosen:
            number |= option.result
        sets.setdefault(number, []).append(chosen)
    others = [_merged(chosen) for chosen in itertools.product(*harmless)]
    for number in sorted(sets):
        combined = (_combined(plan, a, b) for a in map(_merged, sets[number]) for b in others)
        found = [c for c in combined if conflict(c[0]) is None]
        if found:
            yield found


def _options(plan: Plan, row: Optimization, keep: frozenset[str]) -> list[_Option]:
    """The values of one toggle that can be trained and that no pin forbids."""
    present, values = row.value(plan), row.values(plan)
    options = []
    for value in values if present in values else (present, *values):
        changes = row.changes(plan, value) if row.changes else {row.key: value}
        pinned = [key for key in changes if key in keep]
        if any(changes[key] != plans.get(plan, key) for key in pinned):
            continue
        if row.refusal(plan, value) is not None and not (value == present and pinned):
            continue
        kind = result_class(row.key, present, value)
        options.append(
            _Option(
                value,
                _section(changes, "optimize"),
                _section(changes, "train"),
                value != present,
                0 if kind is None else 1 << kind,
            )
        )
    return options


def _section(changes: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.partition(".")[2]: v for key, v in changes.items() if key.startswith(f"{name}.")}


_Merged = tuple[dict[str, Any], dict[str, Any], int]


def _merged(options: Iterable[_Option]) -> _Merged:
    optimize: dict[str, Any] = {}
    train: dict[str, Any] = {}
    count = 0
    for option in options:
        if option.changed:
            optimize.update(option.optimize)
            train.update(option.train)
            count += 1
    return optimize, train, count


def _combined(plan: Plan, a: _Merged, b: _Merged) -> tuple[Plan, int]:
    optimize, train = {**a[0], **b[0]}, {**a[1], **b[1]}
    changed: Plan = msgspec.structs.replace(
        plan,
        optimize=msgspec.structs.replace(plan.optimize, **optimize) if optimize else plan.optimize,
        train=msgspec.structs.replace(plan.train, **train) if train else plan.train,
    )
    return changed, a[2] + b[2]


def _candidate(plan: Plan, changes: int, budget: Budget) -> _Candidate:
    return _Candidate(plan, seconds_per_token(plan, budget), changes)


def seconds_per_token(plan: Plan, budget: Budget) -> float:
    """Estimated seconds of a step over its tokens."""
    return step_seconds(plan, architecture_of(plan), budget) / plan.tokens_per_step


def _solution(
    plan: Plan, budget: Budget, solved: Plan, before: MemoryTable, after: MemoryTable
) -> Fit:
    changed = [row for row in OPTIMIZATIONS if row.key not in SIZES]
    changes = tuple(
        Change(key=row.key, label=row.label, before=row.value(plan), after=row.value(solved))
        for row in changed
        if row.value(plan) != row.value(solved)
    )
    kinds = {result_class(change.key, change.before, change.after) for change in changes}
    return Fit(
        plan=solved,
        fits=after.fits,
        changes=changes,
        result_changes=tuple(words for n, words in enumerate(RESULT_CLASSES) if n in kinds),
        before=before,
        after=after,
        time_factor=seconds_per_token(solved, budget) / seconds_per_token(plan, budget),
    )
