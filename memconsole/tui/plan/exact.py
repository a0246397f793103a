"""The plan screen's exact numbers: requested when no key is pressed, shown once they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from textual.timer import Timer

from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.screens.console import Console
from memconsole.tui.views.plan_view import ExactState, PlanView

if TYPE_CHECKING:
    from memconsole.memory.estimate import Lookup
    from memconsole.plan.machine.budget import Budget

REST_SECONDS = 0.7
"""The tracer is asked once no key has been pressed for this long."""
TICK_SECONDS = 1.0
_STOPPED = "stopped · {key} asks"
_LOOKING = "read only, none are traced"
_BUSY = "a run trains on this CPU · {key} asks anyway"


class ExactOwner(Protocol):
    """What `ExactNumbers` needs from the screen that shows them."""

    @property
    def console(self) -> Console: ...

    @property
    def composed(self) -> bool: ...

    def set_timer(self, delay: float, callback: Callable[[], None]) -> Timer: ...

    def set_interval(self, interval: float, callback: Callable[[], None]) -> Timer: ...

    def shown_key(self, id: str) -> str: ...

    def show_exact(self, state: ExactState) -> None:
        """Show the progress."""


class ExactNumbers:
    """Requests the exact numbers of the plan on screen, and reports the progress to the screen."""

    def __init__(self, owner: ExactOwner) -> None:
        self._owner = owner
        self._shown = ExactState()
        self._followed: tuple[Plan, Budget, str] | None = None
        """The question that was put to the store at once, and to the tracer after a pause."""
        self._resting: Timer | None = None
        self._ticking: Timer | None = None
        self._stopped = False
        self._insisted = False
        """The user asked for exact numbers although a run trains on this CPU."""

    @property
    def lookup(self) -> Lookup | None:
        """Finds known exact numbers, for pricing."""
        book = self._owner.console.book
        return book.lookup if book is not None else None

    def follow(self, view: PlanView) -> None:
        """Called after every change of the view: ask the store at once, the tracer after a
        pause.
        """
        if view.estimate is None or view.stale or view.problem:
            return
        wanted = (view.plan, view.estimate.table.budget, view.row.key)
        if self._followed is not None and self._alike(self._followed, wanted):
            return
        anew = self._followed is None or self._followed[0] != view.plan
        self._followed = wanted
        if self._resting is not None:
            self._resting.stop()
        self._resting = self._owner.set_timer(REST_SECONDS, self._ask)
        book = self._owner.console.book
        if book is not None and anew:
            book.ask(view.plan, wanted[1], trace=False)
            self.refresh()

    @staticmethod
    def _alike(a: tuple[Plan, Budget, str], b: tuple[Plan, Budget, str]) -> bool:
        """Whether both would ask the same question. Free memory does not matter."""
        return a[0] == b[0] and a[2] == b[2] and _place(a[1]) == _place(b[1])

    def hidden(self) -> None:
        """Another screen covers this one: stop tracing if a run trains on this CPU."""
        if (
            self._followed is not None
            and not self._allowed()
            and self._owner.console.book is not None
        ):
            self._owner.console.book.rest()

    def toggle(self) -> str:
        """Stop requesting exact numbers, or request them now. Returns a notice."""
        book = self._owner.console.book
        problem = self._shown.problem
        if self._allowed() and not problem:
            self._stopped, self._insisted = True, False
            if book is not None:
                book.rest()
            words = f"no longer asking for exact numbers; {self._key()} asks again"
        else:
            self._stopped, self._insisted = False, True
            if book is not None:
                book.forget_problems()
            words = f"asking again; last time: {problem}" if problem else "asking for exact numbers"
            self._ask()
        self.refresh()
        return words

    def _key(self) -> str:
        return self._owner.shown_key("exact")

    def _allowed(self) -> bool:
        """Whether the tracer may run: the user has not stopped it, no run trains on this CPU, and
        this console is not read-only."""
        if self._owner.console.readonly:
            return False
        return not self._stopped and (self._insisted or not self._processor_trains())

    def _processor_trains(self) -> bool:
        run = self._owner.console.run_view.snapshot
        if run is None:
            return bool(self._owner.console.run_id)
        kind = run.facts.started.device_kind if run.facts.started is not None else "cpu"
        return self._owner.console.run_view.live and kind == "cpu"

    def _ask(self) -> None:
        """No key was pressed for a while: ask about this plan and those one key press away."""
        followed = self._followed
        if followed is None or not self._owner.composed:
            return
        if self._allowed():
            from memconsole.memory.tracers.question import neighbours

            plan, budget, row = followed
            book = self._owner.console.open_book()
            if book is not None:
                book.ask(plan, budget, neighbours(plan, row, budget.kind))
        self.refresh()

    def refresh(self) -> None:
        """Show the progress, and check again in a second if it is not done."""
        state = self._state()
        waiting = state.seconds is not None
        if waiting and self._ticking is None:
            self._ticking = self._owner.set_interval(TICK_SECONDS, self.refresh)
        elif not waiting and self._ticking is not None:
            self._ticking.stop()
            self._ticking = None
        if state != self._shown:
            self._shown = state
            self._owner.show_exact(state)

    def _state(self) -> ExactState:
        followed, book = self._followed, self._owner.console.book
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
            return ExactState(resting=_STOPPED.format(key=self._key()))
        if self._owner.console.readonly:
            return ExactState(resting=_LOOKING)
        return ExactState(resting="" if self._allowed() else _BUSY.format(key=self._key()))


def _place(budget: Budget) -> tuple[str, str, bool]:
    """The parts of a budget that change the question."""
    return budget.name, budget.kind, budget.local
