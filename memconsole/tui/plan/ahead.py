"""What the next key press will need, made while the keys rest, a few milliseconds of the event loop at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator

from textual.timer import Timer

from memconsole.plan.plan import Plan
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.views import PlanView

AHEAD_SECONDS = 0.1
"""Keys that rest so long are followed by some of this work."""
SLICE_SECONDS = 0.004
"""Of the event loop at a time: a key that comes meanwhile waits no longer."""


class PlanAhead(ConsoleScreen, inherit_bindings=False):
    """The part of `PlanScreen` that prepares pricing the plans that are one key press away."""

    looks_ahead = False
    """Whether something is left to prepare."""
    _ahead: Iterator[None] = iter(())
    _ahead_of: tuple[Plan, str] | None = None
    _ahead_timer: Timer | None = None

    def ahead_follows(self, view: PlanView) -> None:
        """After every change of the view: begin anew if the plan or its device is another."""
        if view.estimate is None or view.stale or view.problem:
            return
        budget = view.estimate.table.budget
        if self._ahead_of == (view.plan, budget.kind):
            return
        from memconsole.memory.tracers.ahead import prepared

        self._ahead_of = (view.plan, budget.kind)
        self._ahead, self.looks_ahead = prepared(view.plan, budget, view.row.key), True
        if self._ahead_timer is not None:
            self._ahead_timer.stop()
        self._ahead_timer = self.set_timer(AHEAD_SECONDS, self._ahead_slice)

    def _ahead_slice(self) -> None:
        end = time.monotonic() + SLICE_SECONDS
        for _ in self._ahead:
            if time.monotonic() > end:
                self._ahead_timer = self.set_timer(SLICE_SECONDS, self._ahead_slice)
                return
        self.looks_ahead = False
