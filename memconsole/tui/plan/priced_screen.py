"""The part of the plan screen that holds the plan and prices it after each change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from textual import on, work
from textual.message import Message
from textual.worker import get_current_worker

from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.plan.counting import ItemCounts, counted
from memconsole.tui.plan.pricing import LOOP_SECONDS, Priced, budget_moved, price, with_rows
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.views.plan_view import PlanView

if TYPE_CHECKING:
    from memconsole.memory.estimate import Lookup


@dataclass
class PriceReady(Message, bubble=False):
    """A plan was priced in a worker. `generation` is the number of the request."""

    generation: int
    priced: Priced


class PricedScreen(ConsoleScreen, inherit_bindings=False):
    """Owns the `PlanView`. `PlanScreen` adds the widgets that show it."""

    def __init__(self, plan: Plan, keys: KeyTable) -> None:
        super().__init__()
        self.view = PlanView(plan, keys=keys)
        self.touched = False
        """Whether the user has changed anything yet."""
        self._counts = ItemCounts()
        self._generation = 0
        self._slow = True
        """The last pricing took longer than a frame, or there was none yet."""

    @property
    def lookup(self) -> Lookup | None:
        """Finds known exact numbers, for pricing."""
        raise NotImplementedError

    def view_shown(self, view: PlanView) -> None:
        """Called after each change of the view that was drawn."""

    def plan_changed(self) -> None:
        """Called after each change of the plan, before it is priced."""

    def plan_priced(self) -> None:
        """Called after each pricing."""

    def _show(self, view: PlanView) -> None:
        """Change the view and update the widgets. The view changes only here."""
        self.view = view = with_rows(view, self.lookup)
        if self.redraw():
            self.view_shown(view)

    def change(self, make: Callable[[Plan], Plan]) -> None:
        """Change the plan and price it. If that is not allowed, show why and change nothing."""
        self.notice("")
        self.touched = True
        try:
            plan = make(self.view.plan)
        except PlanError as error:
            self.notice(str(error), "bad")
            return
        self._settle(self.view.changed(plan))

    def _settle(self, view: PlanView) -> None:
        if view.plan != self.view.plan:
            self.view = view
            self.plan_changed()
            self._reprice()

    def devices_changed(self, devices: Devices) -> None:
        """Store a new probe reading. The budget is checked once this screen is shown."""
        self.view = replace(self.view, devices=devices)
        if self.is_current:
            self._follow_budget()

    def _follow_budget(self) -> None:
        """Price again if the budget changed noticeably."""
        if budget_moved(self.view):
            self._reprice()

    def _reprice(self) -> None:
        """Price the plan now if that is quick, else in a worker while the numbers are outdated."""
        self._generation += 1
        if self._slow:
            self._show(replace(self.view, stale=True))
            self._price_in_worker(self._generation, self.view.plan, self.view.devices)
        else:
            self._priced(price(self.view.plan, self.view.devices, self.lookup))

    def _price_again(self) -> None:
        """Price the present plan anew without an outdated mark; only the numbers change."""
        view = self.view
        if view.estimate is None or view.stale or view.problem or not self.composed:
            return
        self._priced(price(view.plan, view.devices, self.lookup))

    @work(thread=True, exclusive=True, group="pricing", exit_on_error=False)
    def _price_in_worker(self, generation: int, plan: Plan, devices: Devices | None) -> None:
        priced = price(plan, devices, self.lookup)
        if not get_current_worker().is_cancelled:
            self.post_message(PriceReady(generation, priced))

    @on(PriceReady)
    def _price_ready(self, message: PriceReady) -> None:
        if message.generation == self._generation:
            self._priced(message.priced)

    def _priced(self, priced: Priced) -> None:
        # The first pricing also reads the catalogs, so it may be slow without consequences.
        warm = self.view.estimate is not None
        self._slow = priced.seconds > LOOP_SECONDS * (1 if warm else 20)
        if priced.estimate is None:
            self._show(replace(self.view, problem=priced.problem, stale=True))
        else:
            view = replace(self.view, estimate=priced.estimate, cards=priced.cards)
            self._show(replace(view, problem="", stale=False))
            if not self.console.readonly and (name := self._counts.wanted(priced.plan)):
                self._count_items(priced.plan, name)
        self.plan_priced()

    @work(exit_on_error=False, group="counting")
    async def _count_items(self, plan: Plan, name: str) -> None:
        if await counted(plan, name):
            self._reprice()
