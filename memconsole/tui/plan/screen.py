"""The plan screen: change settings, and see at once what they cost and whether they fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import Optimization
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS, with_value
from memconsole.runs.read.shown.words import state_word
from memconsole.tui.keys.rows import bindings
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.plan.ahead import LookAhead
from memconsole.tui.plan.dialogs.pickers import Pickers
from memconsole.tui.plan.dialogs.plan_files import PlanFiles
from memconsole.tui.plan.dialogs.solving import Solver
from memconsole.tui.plan.exact import ExactNumbers
from memconsole.tui.plan.priced_screen import PricedScreen
from memconsole.tui.plan.pricing import devices_awaited
from memconsole.tui.plan.widgets.budget_bar import BudgetBar
from memconsole.tui.plan.widgets.memory_table import MemoryTableView, is_long
from memconsole.tui.plan.widgets.phase_strip import PhaseStrip
from memconsole.tui.plan.widgets.plan_summary import PlanSummary
from memconsole.tui.plan.widgets.planned_speed import PlannedSpeed
from memconsole.tui.plan.widgets.solved import Solution, Solved
from memconsole.tui.plan.widgets.toggle_detail import ToggleDetail
from memconsole.tui.plan.widgets.toggles import Toggles
from memconsole.tui.screens.base import SMALLEST
from memconsole.tui.views.plan_view import ExactState, PlanView
from memconsole.units import value_word

if TYPE_CHECKING:
    from memconsole.memory.estimate import Lookup


DESCRIBING_ROWS = 30
"""Rows of a screen from which the right column describes the selected optimization. All but one or two are listed then."""
ALL_ROWS = len(OPTIMIZATIONS) + 16
"""Rows of a screen from which all are listed and the description has room under the list; the other rows are a rule, the
summary, title, keys and the description."""


class PlanScreen(PricedScreen, inherit_bindings=False):
    """Shows the `PlanView` in its widgets, and changes it by keys and dialogs."""

    SCREEN = "plan"
    BINDINGS = bindings("plan")
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-flat"),
        (SMALLEST.height, "-low"),
        (22, "-short"),
        (DESCRIBING_ROWS, "-middle"),
        (ALL_ROWS, "-tall"),
    ]

    def __init__(self, plan: Plan, keys: KeyTable) -> None:
        super().__init__(plan, keys)
        self._exact = ExactNumbers(self)
        self._ahead = LookAhead(self)
        self._solver = Solver(self)
        self._pickers = Pickers(self)
        self._files = PlanFiles(self)
        self._launch_waits = False
        """The launch key was pressed before the device's driver had answered."""

    def compose_body(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield PlanSummary(id="summary")
                yield Toggles(id="toggles")
                yield ToggleDetail(id="detail")
                yield ToggleDetail(id="left-detail", whole=True)
            with Vertical(id="right"):
                yield MemoryTableView(id="memory")
                yield BudgetBar(id="budget")
                yield PhaseStrip(id="phases")
                yield PlannedSpeed(id="speed")
                yield ToggleDetail(id="right-detail", whole=True)
        yield Solved(id="solved")

    def on_mount(self) -> None:
        self.call_after_refresh(self._reprice)

    def on_screen_resume(self) -> None:
        self._show(self.view)
        if self.view.estimate is not None:
            self._follow_budget()

    def on_screen_suspend(self) -> None:
        self._launch_waits = False
        self._exact.hidden()

    # State

    def view_shown(self, view: PlanView) -> None:
        self._exact.follow(view)
        self._ahead.follow(view)

    def plan_changed(self) -> None:
        self._solver.plan_changed()

    def plan_priced(self) -> None:
        self._solver.priced()
        if self._launch_waits and not devices_awaited(self.view):
            self.call_later(self.action_launch)

    def draw_body(self) -> None:
        view = self.view
        self.set_class(view.estimate is not None and is_long(view.estimate.table), "-long")
        self.part(PlanSummary).show(view)
        self.part(Toggles).show(view)
        for id in ("detail", "left-detail", "right-detail"):
            self.part(ToggleDetail, id).show(view)
        self.part(MemoryTableView).show(view)
        self.part(BudgetBar).show(view)
        self.part(PhaseStrip).show(view)
        self.part(PlannedSpeed).show(view)

    def title_line(self) -> tuple[str, str]:
        note = ""
        run = self.console.run_view.snapshot
        if run is not None and self.console.run_view.live:
            note = f"● {run.name or run.id} is {state_word(run)} · {self.shown_key('training')}"
        return "plan", note

    def conditions(self) -> set[str]:
        conditions = super().conditions()
        conditions |= {name for name in ("undo", "redo") if getattr(self.view, name)}
        return conditions

    def reasons(self) -> dict[str, str]:
        return {"undo": "nothing to undo", "redo": "nothing to redo"}

    # The list

    @on(Toggles.Clicked)
    def _clicked(self, message: Toggles.Clicked) -> None:
        """A click selects an optimization; a click on the selected one steps to its next value."""
        message.stop()
        if message.row == self.view.cursor:
            self.action_step(1)
        else:
            self.action_move(message.row - self.view.cursor)

    def action_move(self, rows: int) -> None:
        cursor = self.view.cursor + rows
        cursor = cursor % len(OPTIMIZATIONS) if abs(rows) == 1 else min(max(0, cursor), len(OPTIMIZATIONS) - 1)  # fmt: skip
        self.notice("")
        self._show(replace(self.view, cursor=cursor))

    def action_step(self, direction: int) -> None:
        self._step(self.view.row, direction)

    def action_step_row(self, key: str) -> None:
        row = BY_KEY[key]
        self.view = replace(self.view, cursor=OPTIMIZATIONS.index(row))
        self._step(row, 1)

    def _step(self, row: Optimization, direction: int) -> None:
        value = self.view.next_value(row) if direction > 0 else self.view.previous_value(row)
        self.change(lambda plan: with_value(row, plan, value))

    def action_undo(self) -> None:
        self.notice("")
        self._settle(self.view.undone())

    def action_redo(self) -> None:
        self.notice("")
        self._settle(self.view.redone())

    # Pickers

    def open(self, screen: Screen[object], done: Callable[[object], None] | None = None) -> None:
        """Show a dialog; `done` is called with its result."""
        self.app.push_screen(screen, done)

    def action_pick_model(self) -> None:
        self._pickers.pick("model", "model.name")

    def action_pick_data(self) -> None:
        self._pickers.pick("dataset", "data.source")

    def action_pick_device(self) -> None:
        self._pickers.pick("device", "device.name")

    def action_pick_backend(self) -> None:
        self._pickers.pick("backend", "backend")

    def action_pick_preset(self) -> None:
        self._pickers.preset()

    def action_settings(self) -> None:
        self._pickers.setting()

    # Files

    def action_save(self) -> None:
        self._files.save()

    def action_load(self) -> None:
        self._files.load()

    def action_command(self) -> None:
        self._files.command()

    def action_compare(self) -> None:
        self._files.compare()

    # Exact numbers

    @property
    def lookup(self) -> Lookup | None:
        """Finds known exact numbers, for pricing."""
        return self._exact.lookup

    def action_exact(self) -> None:
        """Stop requesting exact numbers, or request them now."""
        self.notice(self._exact.toggle())

    def show_exact(self, state: ExactState) -> None:
        """Show the progress of the exact numbers."""
        self._show(replace(self.view, exact=state))

    def exact_news(self) -> None:
        """Price again without an outdated mark; only the numbers change."""
        self._exact.refresh()
        self._price_again()

    # Solving

    def action_fit(self) -> None:
        """Change to the fastest settings that fit, as one step that can be undone."""
        self._solver.fit()

    def action_largest_batch(self) -> None:
        self._solver.largest_batch()

    def action_largest_length(self) -> None:
        self._solver.largest_length()

    def solved(self, solution: Solution) -> None:
        """Change to the plan of `solution`, and show what that changes until the next key."""
        self.change(lambda _: solution.plan)
        if self.view.plan == solution.plan:
            self._show_solved(solution)

    def notice(self, words: str, role: str = "accent") -> None:
        self._launch_waits = False
        self._show_solved(None)
        super().notice(words, role)

    def _show_solved(self, solution: Solution | None) -> None:
        """Show what a search changed. On a low screen this replaces the description of the selected optimization."""
        if self.composed:
            self.part(Solved).show(solution, self.shown_key("undo"))
            self.set_class(solution is not None, "-solved")

    def action_pin(self) -> None:
        """Pin or unpin the selected optimization."""
        row = self.view.row
        pinned = self.view.pinned ^ {row.key}
        kept = row.key in pinned
        words = f"{self.shown_key('fit')} {'keeps' if kept else 'may change'} {row.label}"
        self._show(replace(self.view, pinned=pinned))
        self.notice(f"{words} = {value_word(row.value(self.view.plan))}" if kept else words)

    # Launch

    async def action_launch(self) -> None:
        """Ask for a name and show what will run, unless it cannot be trained here. Waits for the devices' drivers."""
        from memconsole.tui.plan.dialogs.launching import ask_and_launch

        self._launch_waits = False
        if self.view.problem and devices_awaited(self.view):
            self.notice("waiting for the device's driver before the launch; any key cancels")
            self._launch_waits = True
            return
        if self.view.problem:
            self.notice(f"cannot launch: {self.view.problem}", "bad")
            return
        await ask_and_launch(self, self.view.plan, self.view.devices, self.lookup)
