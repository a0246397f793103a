"""The plan screen: pick, toggle, and see at once what it costs and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.worker import get_current_worker

from memconsole.devices.reading import Devices
from memconsole.plan import plan as plans
from memconsole.plan.optimization import Optimization
from memconsole.plan.optimizations import BY_KEY, OPTIMIZATIONS, press
from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.draw.words import value_word
from memconsole.tui.keys.rows import bindings
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.messages import PriceReady
from memconsole.tui.plan.budget_bar import BudgetBar, Pace, verdict_words
from memconsole.tui.plan.files import PlanFiles
from memconsole.tui.plan.memory_table import MemoryTableView, PhaseStrip
from memconsole.tui.plan.plan_summary import PlanSummary
from memconsole.tui.plan.pricing import LOOP_SECONDS, Priced, price, with_rows
from memconsole.tui.plan.toggles import ToggleDetail, Toggles
from memconsole.tui.views import PlanView

_NOTICEABLE = 0.01
"""A budget that moved by less than this share of the device is not priced anew."""


class PlanScreen(PlanFiles, inherit_bindings=False):
    """Owns the `PlanView`; its widgets mirror it."""

    SCREEN = "plan"
    BINDINGS = bindings("plan")

    def __init__(self, plan: Plan, keys: KeyTable) -> None:
        super().__init__()
        self.view = PlanView(plan, keys=keys)
        self.touched = False
        """Whether a person changed anything yet."""
        self._generation = 0
        self._slow = True
        """The last pricing took longer than a frame (the first one always may)."""

    def compose_body(self) -> ComposeResult:
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield PlanSummary(id="summary")
                yield Toggles(id="toggles")
                yield ToggleDetail(id="detail")
            with Vertical(id="right"):
                yield MemoryTableView(id="memory")
                yield BudgetBar(id="budget")
                yield PhaseStrip(id="phases")
                yield Pace(id="pace")

    def on_mount(self) -> None:
        self.call_after_refresh(self._reprice)

    def on_screen_resume(self) -> None:
        self._show(self.view)
        if self.view.estimate is not None:
            self._follow_budget()

    def on_screen_suspend(self) -> None:
        self.exact_hidden()

    # State

    def _show(self, view: PlanView) -> None:
        """The one place where the view changes and the widgets follow."""
        self.view = view = with_rows(view, self.exact_lookup)
        if not self.composed or not self.is_current:
            return
        with self.app.batch_update():
            self.query_one(PlanSummary).show(view)
            self.query_one(Toggles).show(view)
            self.query_one(ToggleDetail).show(view)
            self.query_one(MemoryTableView).show(view)
            self.query_one(BudgetBar).show(view)
            self.query_one(PhaseStrip).show(view)
            self.query_one(Pace).show(view)
            self.refresh_frame()
        self.exact_follows(view)
        self.ahead_follows(view)

    def title_line(self) -> tuple[str, str]:
        note = ""
        run = self.console.run_view.snapshot
        if run is not None and self.console.run_view.live:
            note = f"● {run.name or run.id} is {run.state} · {self.shown_key('training')}"
        return "plan", note

    def conditions(self) -> set[str]:
        found = super().conditions()
        found |= {name for name in ("undo", "redo") if getattr(self.view, name)}
        return found

    def change(self, make: Callable[[Plan], Plan]) -> None:
        """Change the plan and price it. A change that is not allowed says why and changes nothing."""
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
            self._reprice()

    def devices_changed(self, devices: Devices) -> None:
        """A new probe reading; what it means waits until this screen is seen."""
        self.view = replace(self.view, devices=devices)
        if self.is_current:
            self._follow_budget()

    def _follow_budget(self) -> None:
        """Price anew if the budget moved noticeably."""
        from memconsole.devices.budget import budget

        try:
            now = budget(self.view.plan, self.view.devices)
        except PlanError as error:
            if str(error) != self.view.problem:
                self._reprice()
            return
        found = self.view.estimate
        known = found.table.budget if found is not None else None
        if (
            known is None
            or known.name != now.name
            or self.view.problem
            or abs(known.usable_bytes - now.usable_bytes) > _NOTICEABLE * now.total_bytes
        ):
            self._reprice()

    # Pricing

    def _reprice(self) -> None:
        """Price the plan now if that is quick, else in a worker with a stale mark."""
        self._generation += 1
        if self._slow:
            self._show(replace(self.view, stale=True))
            self._price_in_worker(self._generation, self.view.plan, self.view.devices)
        else:
            self._priced(price(self.view.plan, self.view.devices, self.exact_lookup))

    @work(thread=True, exclusive=True, group="pricing", exit_on_error=False)
    def _price_in_worker(self, generation: int, plan: Plan, devices: Devices | None) -> None:
        priced = price(plan, devices, self.exact_lookup)
        if not get_current_worker().is_cancelled:
            self.post_message(PriceReady(generation, priced))

    @on(PriceReady)
    def _price_ready(self, message: PriceReady) -> None:
        if message.generation == self._generation:
            self._priced(message.priced)

    def _priced(self, priced: Priced) -> None:
        # The first pricing also reads the catalogs; one slow one is no reason to leave the loop.
        warm = self.view.estimate is not None
        self._slow = priced.seconds > LOOP_SECONDS * (1 if warm else 20)
        if priced.estimate is None:
            self._show(replace(self.view, problem=priced.problem, stale=True))
            return
        before = self.view.before
        self._show(
            replace(self.view, estimate=priced.estimate, problem="", stale=False, before=before)
        )

    # The list

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
        if direction > 0:
            self.change(lambda plan: press(row, plan, row.next_value(plan)))
        else:
            self.change(lambda plan: press(row, plan, _previous_value(row, plan)))

    def action_undo(self) -> None:
        self.notice("")
        self._settle(self.view.undone())

    def action_redo(self) -> None:
        self.notice("")
        self._settle(self.view.redone())

    # Pickers

    def _pick(self, kind: str, key: str) -> None:
        from memconsole.plan import catalog
        from memconsole.tui.screens.pick import PickScreen, choices_for

        def picked(value: object) -> None:
            if isinstance(value, str):
                self.change(lambda plan: catalog.choose(plan, key, value))

        choices, free = choices_for(kind, self.view.plan, self.view.devices)
        present = str(plans.get(self.view.plan, key))
        self.app.push_screen(PickScreen(f"choose the {kind}", choices, present, free), picked)

    def action_pick_model(self) -> None:
        self._pick("model", "model.name")

    def action_pick_data(self) -> None:
        self._pick("dataset", "data.source")

    def action_pick_device(self) -> None:
        self._pick("device", "device.name")

    def action_pick_backend(self) -> None:
        self._pick("backend", "backend")

    def action_pick_preset(self) -> None:
        from memconsole.plan import catalog
        from memconsole.tui.screens.pick import Choice, PickScreen

        choices = [
            Choice(name, name, f"{entry.label} · {entry.help}")
            for name, entry in catalog.presets().items()
        ]

        def picked(value: object) -> None:
            if isinstance(value, str):
                self.change(lambda _: catalog.preset(value))

        self.app.push_screen(PickScreen("start from a preset", choices), picked)

    def action_settings(self) -> None:
        """Find a setting, then type its value; the prompt stays until the value is allowed."""
        from memconsole.tui.screens.pick import Choice, PickScreen

        plan = self.view.plan
        choices = [
            Choice(key, key, f"{value_word(plans.get(plan, key))} · {setting.help}", 28)
            for key, setting in plans.SETTINGS.items()
        ]

        def picked(value: object) -> None:
            if isinstance(value, str):
                self._edit_setting(value)

        self.app.push_screen(PickScreen("change a setting", choices), picked)

    def _edit_setting(self, key: str) -> None:
        from memconsole.tui.screens.prompt import PromptScreen

        setting = plans.SETTINGS[key]
        text = plans.written(plans.get(self.view.plan, key))

        def refusal(word: str) -> str | None:
            try:
                plans.replace(self.view.plan, {key: plans.parse_value(key, word)})
            except PlanError as error:
                return str(error)
            return None

        def entered(word: object) -> None:
            if isinstance(word, str):
                self.change(lambda plan: plans.replace(plan, {key: plans.parse_value(key, word)}))

        about = f"{setting.help} — {setting.expects}"
        self.app.push_screen(PromptScreen(key, text, about, refusal), entered)

    # Launch

    def action_launch(self) -> None:
        if self.view.problem:
            self.notice(f"cannot launch: {self.view.problem}", "bad")
            return
        found = self.view.estimate
        if found is not None and not self.view.stale and not found.table.fits:
            from memconsole.tui.screens.confirm import Answer, ConfirmScreen

            def answered(value: object) -> None:
                if value == "launch":
                    self._launch()

            question = f"This plan {verdict_words(found.table)} on {found.table.budget.name}."
            answers = (Answer("launch", "start it all the same"),)
            self.app.push_screen(ConfirmScreen(question, answers), answered)
            return
        self._launch()

    def _launch(self) -> None:
        self.notice("launching …")
        self.console.launch(self.view.plan)


def _previous_value(row: Optimization, plan: Plan) -> object:
    """The value before the present one, the last before the first."""
    values = row.values(plan)
    present = row.value(plan)
    found: object = values[values.index(present) - 1] if present in values else values[0]
    return found
