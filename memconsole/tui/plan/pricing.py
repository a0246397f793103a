"""Prices a plan for the screens: its estimate, or one line that says why there is none."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from memconsole.devices.reading import Devices
from memconsole.errors import FileError
from memconsole.memory.table import Estimate, MemoryTable
from memconsole.plan.plan import Plan, PlanError

if TYPE_CHECKING:
    from memconsole.calibration import Receipts
    from memconsole.memory.answers.cards import Needed
    from memconsole.memory.estimate import Lookup
    from memconsole.tui.views.plan_view import PlanView

ROW_LENGTH = "data.sequence_length"
LOOP_SECONDS = 0.03
"""Slower pricing moves off the event loop, because a key must be answered within 50 ms."""

NOTICEABLE = 0.01
"""If the budget changes by a smaller share of the device, the plan is not priced again."""


@dataclass(frozen=True)
class Priced:
    """The result of pricing one plan."""

    plan: Plan
    estimate: Estimate | None
    problem: str
    """Why there is no estimate; empty if there is one."""
    seconds: float
    """Processor time; unlike wall time it does not count other programs."""
    cards: Needed | None = None
    """On how many devices it fits; None if one is enough."""


@lru_cache(maxsize=1)
def _receipts() -> Receipts:
    from memconsole.calibration import Receipts

    return Receipts()


def calibrated(plan: Plan, estimate: Estimate) -> Estimate:
    """`estimate`, calibrated if runs with the plan's setup were measured on this machine."""
    receipts = _receipts()
    receipts.refresh()
    return receipts.calibrate(plan, estimate)


def calibrated_table(plan: Plan, table: MemoryTable) -> MemoryTable:
    """`table`, calibrated in the same way."""
    return _receipts().calibrate_table(plan, table)


def price(plan: Plan, devices: Devices | None, lookup: Lookup | None = None) -> Priced:
    """Estimate `plan` on its device.

    The device's free memory comes from `devices`, exact numbers from `lookup`.
    """
    from memconsole.devices.budget import budget
    from memconsole.memory.answers.cards import needed
    from memconsole.memory.estimate import estimate, table_of
    from memconsole.plan.check import check

    begun = time.thread_time()
    try:
        check(plan)
        priced = calibrated(plan, estimate(plan, budget(plan, devices), lookup))
        cards = needed(
            plan,
            priced.table,
            lambda other, on: calibrated_table(other, table_of(other, on, lookup)),
        )
    except PlanError as error:
        return Priced(plan, None, str(error), time.thread_time() - begun)
    except OSError as error:  # of a file that the plan names
        if not error.filename:
            raise
        return Priced(plan, None, str(FileError(error)), time.thread_time() - begun)
    return Priced(plan, priced, "", time.thread_time() - begun, cards)


def budget_moved(view: PlanView) -> bool:
    """Whether the newest readings give the plan another device or a clearly different budget."""
    from memconsole.devices.budget import budget

    try:
        now = budget(view.plan, view.devices)
    except PlanError as error:
        return str(error) != view.problem
    if view.estimate is None or view.problem:
        return True
    known = view.estimate.table.budget
    moved = abs(known.usable_bytes - now.usable_bytes)
    return known.name != now.name or moved > NOTICEABLE * now.total_bytes


def devices_awaited(view: PlanView) -> bool:
    """Whether the plan's device is not known before its driver answers."""
    from memconsole.devices.budget import DevicesUnknown, budget

    try:
        budget(view.plan, view.devices)
    except DevicesUnknown:
        return True
    except PlanError:
        return False
    return False


def with_rows(view: PlanView, lookup: Lookup | None = None) -> PlanView:
    """`view`, with prices of document lengths only while the row length is selected."""
    rows = None
    if view.row.key == ROW_LENGTH and view.estimate is not None and not view.stale:
        from memconsole.memory.answers.lengths import known_lengths, priced_lengths
        from memconsole.tui.views.plan_view import RowLengths

        lengths = known_lengths(view.plan)
        try:
            device, price = view.estimate.table.budget, _receipts().price(lookup)
            prices = priced_lengths(view.plan, device, lengths, price) if lengths else ()
        except PlanError:
            prices = ()
        rows = RowLengths(lengths, prices)
    return replace(view, rows=rows) if rows != view.rows else view
