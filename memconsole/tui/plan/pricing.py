"""Prices a plan for the screens: its estimate, or the one line that says why there is none."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from memconsole.devices.reading import Devices
from memconsole.memory.table import Estimate
from memconsole.plan.plan import Plan, PlanError

if TYPE_CHECKING:
    from memconsole.calibration import Receipts
    from memconsole.memory.estimate import Lookup
    from memconsole.tui.views.plan_view import PlanView

ROW_LENGTH = "data.sequence_length"
LOOP_SECONDS = 0.03
"""Pricing that needs more of the processor leaves the event loop: a key is to be answered within 50 ms."""

NOTICEABLE = 0.01
"""A budget that moved by less than this share of the device is not priced anew."""


@dataclass(frozen=True)
class Priced:
    """The outcome of pricing one plan."""

    plan: Plan
    estimate: Estimate | None
    problem: str
    """Why there is no estimate; empty if there is one."""
    seconds: float
    """Of the processor, which unlike the clock does not count what others use."""


@lru_cache(maxsize=1)
def _receipts() -> Receipts:
    from memconsole.calibration import Receipts

    return Receipts()


def _calibrated(plan: Plan, found: Estimate) -> Estimate:
    """`found`, calibrated where runs of the plan's setup were measured on this machine."""
    receipts = _receipts()
    receipts.refresh()
    return receipts.calibrate(plan, found)


def price(plan: Plan, devices: Devices | None, lookup: Lookup | None = None) -> Priced:
    """Estimate `plan` on the device it names, as full as `devices` says it is, as exact as `lookup` knows."""
    from memconsole.devices.budget import budget
    from memconsole.memory.estimate import estimate
    from memconsole.plan.check import check

    begun = time.thread_time()
    try:
        check(plan)
        found = estimate(plan, budget(plan, devices), lookup)
        found = _calibrated(plan, found)
    except PlanError as error:
        return Priced(plan, None, str(error), time.thread_time() - begun)
    return Priced(plan, found, "", time.thread_time() - begun)


def budget_moved(view: PlanView) -> bool:
    """Whether the newest readings give the plan another device, or noticeably more or less of its memory."""
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


def with_rows(view: PlanView, lookup: Lookup | None = None) -> PlanView:
    """`view` with the prices of its documents' lengths while the length of rows is selected, else without."""
    rows = None
    if view.row.key == ROW_LENGTH and view.estimate is not None and not view.stale:
        from memconsole.memory.answers.lengths import known_lengths, priced_lengths
        from memconsole.tui.views.plan_view import RowLengths

        lengths = known_lengths(view.plan)
        try:
            device = view.estimate.table.budget
            prices = priced_lengths(view.plan, device, lengths, lookup) if lengths else ()
        except PlanError:
            prices = ()
        rows = RowLengths(lengths, prices)
    return replace(view, rows=rows) if rows != view.rows else view
