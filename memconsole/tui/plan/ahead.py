"""Prepares what the next key press needs, in slices of a few milliseconds between key presses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from textual.timer import Timer

from memconsole.plan.plan import Plan
from memconsole.tui.views.plan_view import PlanView

AHEAD_SECONDS = 0.1
"""Work starts once no key has been pressed for this long."""
SLICE_SECONDS = 0.004
"""Length of one slice on the event loop; a key press waits no longer than this."""


class Timers(Protocol):
    """Anything with timers, such as a screen."""

    def set_timer(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` once, after `delay` seconds."""


class LookAhead:
    """Prepares pricing the plans that are one key press away."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self.busy = False
        """Whether something is left to prepare."""
        self._work: Iterator[None] = iter(())
        self._work_of: tuple[Plan, str] | None = None
        self._timer: Timer | None = None

    def follow(self, view: PlanView) -> None:
        """Called after every change of the view; starts again if the plan or its device changed."""
        if view.estimate is None or view.stale or view.problem:
            return
        budget = view.estimate.table.budget
        if self._work_of == (view.plan, budget.kind):
            return
        from memconsole.memory.tracers.ahead import prepared

        self._work_of = (view.plan, budget.kind)
        self._work, self.busy = prepared(view.plan, budget, view.row.key), True
        if self._timer is not None:
            self._timer.stop()
        self._timer = self._timers.set_timer(AHEAD_SECONDS, self._slice)

    def _slice(self) -> None:
        end = time.monotonic() + SLICE_SECONDS
        for _ in self._work:
            if time.monotonic() > end:
                self._timer = self._timers.set_timer(SLICE_SECONDS, self._slice)
                return
        self.busy = False
