"""The state of the plan screen: the plan, its price, what can be undone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memconsole.devices.reading import Devices
from memconsole.memory.table import Estimate, MemoryTable, Saving
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import Optimization
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.tui.keys.table import KeyTable

if TYPE_CHECKING:
    from memconsole.memory.answers.cards import Needed
    from memconsole.memory.answers.lengths import LengthPrice
    from memconsole.plan.data.lengths import Lengths

HISTORY = 200
"""The number of undo steps kept."""


@dataclass(frozen=True)
class ExactState:
    """The progress of the plan's exact numbers."""

    seconds: int | None = None
    """Seconds since they were requested; None if none are awaited."""
    resting: str = ""
    """Why they are not being requested."""
    problem: str = ""
    """Why there are none."""


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the data's documents, and their prices."""

    lengths: Lengths | None
    """None until they have been measured."""
    prices: tuple[LengthPrice, ...]


@dataclass(frozen=True)
class PlanView:
    """Everything the plan screen shows."""

    plan: Plan
    estimate: Estimate | None = None
    stale: bool = True
    """The estimate belongs to an earlier plan, or there is none yet."""
    problem: str = ""
    """Why the plan cannot be priced."""
    cards: Needed | None = None
    """On how many devices the priced plan fits; None if one is enough."""
    before: MemoryTable | None = None
    """The table before the last change, for the ± column."""
    cursor: int = 0
    undo: tuple[Plan, ...] = ()
    redo: tuple[Plan, ...] = ()
    devices: Devices | None = None
    pinned: frozenset[str] = frozenset()
    """Optimizations that fitting does not change."""
    exact: ExactState = ExactState()
    rows: RowLengths | None = None
    """The prices of rows that hold a whole document; only set while the row length is selected."""
    keys: KeyTable = KeyTable()

    @property
    def row(self) -> Optimization:
        """The selected optimization."""
        return OPTIMIZATIONS[self.cursor % len(OPTIMIZATIONS)]

    @property
    def priced(self) -> Estimate | None:
        """The estimate, outdated or not; None if the plan cannot be priced."""
        return None if self.problem else self.estimate

    @property
    def kind(self) -> str | None:
        """The kind of the plan's device; None before the first estimate."""
        return None if self.estimate is None else self.estimate.table.budget.kind

    def savings_of(self, key: str) -> tuple[Saving, ...]:
        """What each value of one toggle would save."""
        if self.estimate is None:
            return ()
        return tuple(s for s in self.estimate.savings if s.key == key)

    def next_saving(self, row: Optimization) -> Saving | None:
        """What the next key press on `row` would save."""
        wanted = self.next_value(row)
        savings = self.savings_of(row.key)
        return next((s for s in savings if same_value(s.value, wanted)), None)

    def next_value(self, row: Optimization) -> Any:
        """What a key press selects: the following value that can be trained, the first after the last; the following one
        if none can, so that its press tells why."""
        return self._step(row, 1)

    def previous_value(self, row: Optimization) -> Any:
        """The same in the other direction."""
        return self._step(row, -1)

    def _step(self, row: Optimization, direction: int) -> Any:
        values, present = row.values(self.plan), row.value(self.plan)
        if present not in values:
            return values[0]
        place = values.index(present)
        others = [values[(place + direction * n) % len(values)] for n in range(1, len(values))]
        refused = [s.value for s in self.savings_of(row.key) if not s.available]
        possible = (v for v in others if not any(same_value(v, other) for other in refused))
        return next(possible, others[0] if others else present)

    def changed(self, plan: Plan) -> PlanView:
        """The view with a new plan: the old one can be undone, the estimate is stale."""
        if plan == self.plan:
            return self
        undo = (*self.undo, self.plan)[-HISTORY:]
        return replace(
            self, plan=plan, undo=undo, redo=(), stale=True, before=self._table(), problem=""
        )

    def undone(self) -> PlanView:
        """The view after undoing one change."""
        if not self.undo:
            return self
        return replace(
            self,
            plan=self.undo[-1],
            undo=self.undo[:-1],
            redo=(*self.redo, self.plan),
            stale=True,
            before=self._table(),
            problem="",
        )

    def redone(self) -> PlanView:
        """The view after redoing one change."""
        if not self.redo:
            return self
        return replace(
            self,
            plan=self.redo[-1],
            redo=self.redo[:-1],
            undo=(*self.undo, self.plan),
            stale=True,
            before=self._table(),
            problem="",
        )

    def _table(self) -> MemoryTable | None:
        return self.estimate.table if self.estimate is not None and not self.stale else self.before


def same_value(a: object, b: object) -> bool:
    """Equal in type and value, so that `True` is not `1`."""
    return type(a) is type(b) and a == b if isinstance(a, bool) or isinstance(b, bool) else a == b
