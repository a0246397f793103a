"""How many devices of one kind a plan needs if it does not fit on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from memconsole.memory.answers.places import COUNT, SHARDING, SPLIT, placed, refused
from memconsole.memory.estimate import table_of
from memconsole.memory.seconds import step_seconds
from memconsole.memory.table import MemoryTable
from memconsole.memory.verdict import Verdict
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import SEVERAL, Budget
from memconsole.plan.plan import Plan
from memconsole.units import format_bytes

Price = Callable[[Plan, Budget], MemoryTable]
"""Makes the memory table of a plan on a device."""

MOST = 1024
"""The most devices that are tried."""
SHOWN = 8
"""The table has rows at least up to this number of devices, and up to `LONGEST` as long as nothing fits."""
LONGEST = 64


class Cards(msgspec.Struct, frozen=True, kw_only=True):
    """A plan on some number of devices, with the memory of each."""

    plan: Plan
    table: MemoryTable

    @property
    def count(self) -> int:
        return self.plan.device.count

    @property
    def sharding(self) -> str:
        return self.plan.optimize.sharding

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of an optimizer step, its exchanges counted in full."""
        return step_seconds(self.plan, catalog.model(self.plan), self.table.budget)


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    """The least number of devices on which a plan fits, or why there is none."""

    given: Plan
    found: Cards | None
    """The least number on which the whole band fits; if there is none, the least on which the estimate fits; else None."""
    tight: int | None = None
    """A smaller number of devices on which the plan is tight."""
    reason: str = ""

    @property
    def words(self) -> str:
        """``fits 4 × NVIDIA H100 SXM 80 GB with fsdp (36.2 GiB each)``."""
        if self.found is None:
            return self.reason
        table, plan = self.found.table, self.found.plan
        verb = "fits" if table.verdict is Verdict.FITS else "tight on"
        words = (
            f"{verb} {self.found.count:,} × {table.budget.name} with {self.found.sharding} "
            f"({format_bytes(table.device_bytes)} each)"
        )
        rows, given = plan.effective_batch, self.given.effective_batch
        if rows != given:
            words += f"; a step then has {rows:,} rows, not {given:,}"
        return words + (f"; tight on {self.tight:,}" if self.tight else "")

    @property
    def short(self) -> str:
        """The same in a few words, beside the device's name: ``fits 8 × fsdp, 43.5 GiB each``."""
        if self.found is None:
            return self.reason
        table = self.found.table
        each = f"{self.found.sharding}, {format_bytes(table.device_bytes)} each"
        return f"{table.verdict} {self.found.count:,} × {each}"


def needed(plan: Plan, table: MemoryTable, price: Price = table_of) -> Needed | None:
    """On how many devices like that of `table`, the plan's memory table, the plan fits. None if it fits as it is, or if
    there cannot be several devices of this kind with memory of their own."""
    budget = table.budget
    if table.fits or budget.kind not in SEVERAL:
        return None
    tight: Cards | None = None
    last: Cards | None = None
    for cards in _more(plan, budget, price):
        last = cards
        if cards.table.verdict is Verdict.FITS:
            smaller = tight.count if tight and tight.count < cards.count else None
            return Needed(given=plan, found=cards, tight=smaller)
        if cards.table.verdict is Verdict.TIGHT and tight is None:
            tight = cards
    if tight is not None:
        return Needed(given=plan, found=tight)
    return Needed(given=plan, found=None, reason=_hopeless(plan, last))


def _hopeless(plan: Plan, last: Cards | None) -> str:
    if last is None:
        other = plans.replace(plan, {COUNT: 2 * plan.device.count, SHARDING: SPLIT[-1]})
        return f"does not train on several devices: {refused(other)}"
    words = (
        f"does not fit {last.count:,} × {last.table.budget.name} with {last.sharding} either "
        f"({format_bytes(last.table.device_bytes)} each)"
    )
    whole = placed(plan, last.count, SPLIT[-1])
    reason = refused(whole) if last.sharding != SPLIT[-1] else None
    return f"{words}; {SPLIT[-1]}: {reason}" if reason else words


def _more(plan: Plan, budget: Budget, price: Price) -> Iterator[Cards]:
    """`plan` on twice as many devices, four times and so on, in each way it can be trained."""
    count = 2 * plan.device.count
    while count <= MOST:
        yield from _ways(plan, count, budget, price)
        count *= 2


def _ways(plan: Plan, count: int, budget: Budget, price: Price) -> Iterator[Cards]:
    """`plan` on `count` devices with ddp (all weights on each device) and then with fsdp, as far as each can train it."""
    for sharding in SPLIT:
        other = placed(plan, count, sharding)
        if refused(other) is None:
            yield Cards(plan=other, table=price(other, budget))


def cards_table(plan: Plan, budget: Budget, price: Price = table_of) -> tuple[Cards, ...]:
    """One device, two, four and so on, in each way the plan can be trained, up to the first number on which it fits."""
    if budget.kind not in SEVERAL:
        return ()
    alone = placed(plan, 1, "none")
    rows = [Cards(plan=alone, table=price(alone, budget))]
    count = 2
    while count <= SHOWN or (count <= LONGEST and rows[-1].table.verdict is not Verdict.FITS):
        rows += _ways(plan, count, budget, price)
        count *= 2
    return tuple(rows)
