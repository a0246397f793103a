"""The plan screen's exact numbers: asked for when the keys rest, shown in place when they come."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from textual.timer import Timer

from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.plan.ahead import PlanAhead
from memconsole.tui.plan.pricing import price
from memconsole.tui.views import ExactState, PlanView

if TYPE_CHECKING:
    from memconsole.memory.estimate import Lookup
    from memconsole.plan.budget import Budget
    from memconsole.tui.plan.pricing import Priced

REST_SECONDS = 0.7
"""Keys that rest so long are done for now: the tracer is asked."""
TICK_SECONDS = 1.0
_STOPPED = "stopped · {key} asks"
_BUSY = "a run trains on this CPU · {key} asks all the same"


class ExactPlan(PlanAhead, inherit_bindings=False):
    """The part of `PlanScreen` that asks for exact numbers; the rest is in the attributes below."""

    view: PlanView
    _generation: int
    _slow: bool

    _followed: tuple[Plan, Budget, str] | None = None
    """What the store, and after a rest the tracer, was asked about."""
    _resting: Timer | None = None
    _ticking: Timer | None = None
    _stopped = False
    """A person stopped it."""
    _insisted = False
    """A person asked for it though a run trains on the processor."""

    def _show(self, view: PlanView) -> None:
        raise NotImplementedError

    def _priced(self, priced: Priced) -> None:
        raise NotImplementedError

    @property
    def exact_lookup(self) -> Lookup | None:
        """What is known exactly, for pricing."""
        book = self.console.book
        return book.lookup if book is not None else None

    def exact_follows(self, view: PlanView) -> None:
        """After every change of the view: look into the store at once, ask the tracer when the keys rest."""
        if view.estimate is None or view.stale or view.problem:
            return
        wanted = (view.plan, view.estimate.table.budget, view.row.key)
        if self._followed is not None and self._alike(self._followed, wanted):
            return
        anew = self._followed is None or self._followed[0] != view.plan
        self._followed = wanted
        if self._resting is not None:
            self._resting.stop()
        self._resting = self.set_timer(REST_SECONDS, self._ask)
        book = self.console.book
        if book is not None and anew:
            book.ask(view.plan, wanted[1], trace=False)
            self._refresh_state()

    @staticmethod
    def _alike(a: tuple[Plan, Budget, str], b: tuple[Plan, Budget, str]) -> bool:
        """Whether the same would be asked: free memory does not matter."""
        return a[0] == b[0] and a[2] == b[2] and _place(a[1]) == _place(b[1])

    def exact_hidden(self) -> None:
        """Another screen is over this one: a processor that trains is left alone."""
        if self._followed is not None and not self._allowed() and self.console.book is not None:
            self.console.book.rest()

    def action_exact(self) -> None:
        """Stop asking, or ask now."""
        book = self.console.book
        asking = self._allowed() and not self.view.exact.problem
        if asking:
            self._stopped, self._insisted = True, False
            if book is not None:
                book.rest()
            key = self.shown_key("exact")
            self.notice(f"exact numbers are not asked for any more; {key} asks again")
        else:
            self._stopped, self._insisted = False, True
            if book is not None:
                book.forget_problems()
            if self.view.exact.problem:
                self.notice(f"asked again; before: {self.view.exact.problem}")
            else:
                self.notice("asking for exact numbers")
            self._ask()
        self._refresh_state()

    def _allowed(self) -> bool:
        """Whether the tracer may be asked: not if a person stopped it, nor beside a run on the processor."""
        return not self._stopped and (self._insisted or not self._processor_trains())

    def _processor_trains(self) -> bool:
        run = self.console.run_view.snapshot
        if run is None:
            return bool(self.console.run_id)
        kind = run.started.device_kind if run.started is not None else "cpu"
        return self.console.run_view.live and kind == "cpu"

    def _ask(self) -> None:
        """The keys rest: ask about this plan, then about those one key press away."""
        followed = self._followed
        if followed is None or not self.composed:
            return
        if self._allowed():
            from memconsole.memory.tracers.question import neighbours

            plan, budget, row = followed
            book = self.console.open_book()
            if book is not None:
                book.ask(plan, budget, neighbours(plan, row))
        self._refresh_state()

    def exact_news(self) -> None:
        """Price anew without a sign of it: the numbers change where they stand."""
        view = self.view
        self._refresh_state()
        if view.estimate is None or view.stale or view.problem or not self.composed:
            return
        self._priced(price(view.plan, view.devices, self.exact_lookup))

    def _refresh_state(self) -> None:
        """Show how far it is, and look again in a second if it is not done."""
        state = self._state()
        waiting = state.seconds is not None
        if waiting and self._ticking is None:
            self._ticking = self.set_interval(TICK_SECONDS, self._refresh_state)
        elif not waiting and self._ticking is not None:
            self._ticking.stop()
            self._ticking = None
        if state != self.view.exact:
            self._show(replace(self.view, exact=state))

    def _state(self) -> ExactState:
        followed, book = self._followed, self.console.book
        if followed is None:
            return ExactState()
        plan, budget, _ = followed
        if book is not None:
            try:
                progress = book.progress(plan, budget)
            except PlanError:
                return ExactState()
            if progress.problem:
                return ExactState(problem=progress.problem)
            if progress.pending:
                return ExactState(seconds=int(progress.seconds))
        if self._stopped:
            return ExactState(resting=_STOPPED.format(key=self.shown_key("exact")))
        return ExactState(
            resting="" if self._allowed() else _BUSY.format(key=self.shown_key("exact"))
        )


def _place(budget: Budget) -> tuple[str, str, bool]:
    """What of a budget makes another question."""
    return budget.name, budget.kind, budget.local
