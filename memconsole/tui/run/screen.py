"""The run screen: progress, loss, speed, epochs, output, and memory predicted and measured."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from memconsole.devices.reading import Devices
from memconsole.plan import plan as plans
from memconsole.runs.read.shown.words import state_word
from memconsole.runs.record.requests import Order
from memconsole.tui.draw.chart import GLYPHS
from memconsole.tui.keys.rows import bindings
from memconsole.tui.run.charts import charts_of, is_logarithmic, large_chart
from memconsole.tui.run.epoch_table import EpochTable
from memconsole.tui.run.header import RunHeader, header_lines
from memconsole.tui.run.line_chart import LineChart
from memconsole.tui.run.memory_gauges import MemoryGauges
from memconsole.tui.run.output_pane import OutputPane
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.views.run_view import PANES, RunView


class RunScreen(ConsoleScreen, inherit_bindings=False):
    """Shows the app's `RunView`; the follower outlives this screen."""

    SCREEN = "run"
    BINDINGS = bindings("run")

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield RunHeader(id="run-header")
            with Horizontal(id="upper"):
                yield LineChart(id="chart")
                yield MemoryGauges(id="gauges")
            with Horizontal(id="lower"):
                yield EpochTable(id="epochs")
                yield OutputPane(id="output")

    def devices_changed(self, devices: Devices) -> None:
        """A live run shows the reading with its next snapshot; an ended run is redrawn now."""
        if not self.console.run_view.live:
            self.redraw()

    def run_changed(self, view: RunView) -> None:
        """Draw the new view; only what changed is sent."""
        self.redraw()

    def draw_body(self) -> None:
        view = self.console.run_view
        self.set_class(view.pane == "summary", "-summary")
        self.set_class(len(header_lines(view, self.size.width)) > 2, "-more")
        self.part(RunHeader).show(view)
        self.part(LineChart).show(view)
        self.part(MemoryGauges).show(view)
        self.part(EpochTable).show(view)
        self.part(OutputPane).show(view)

    def title_line(self) -> tuple[str, str]:
        run = self.console.run_view.snapshot
        return "run", run.id if run is not None else self.console.run_id

    def conditions(self) -> set[str]:
        conditions = super().conditions()
        view = self.console.run_view
        if view.snapshot is not None:
            conditions.add("run")
            if view.snapshot.state == "failed":
                conditions.add("failed")
        if view.live:
            conditions.add("live")
            if view.paused:
                conditions.add("paused")
            elif view.snapshot is not None and view.snapshot.state != "queued":
                conditions.add("going")
        if view.resumable:
            conditions.add("resumable")
        if view.out_of_memory:
            conditions.add("out_of_memory")
        if view.symptom is not None and view.symptom.helps:
            conditions.add("symptom")
        if view.pane == "sample" and view.snapshot is not None and len(view.snapshot.samples) > 1:
            conditions.add("samples")
        return conditions

    def reasons(self) -> dict[str, str]:
        view = self.console.run_view
        if view.snapshot is None:
            return dict.fromkeys(("run", "live", "going", "resumable"), "the run is not read yet")
        state = f"the run is {state_word(view.snapshot)}"
        samples = "there is no other sample"
        if view.pane != "sample":
            samples = f"{self.shown_key('pane')} switches to the sample text first"
        return {
            **dict.fromkeys(("live", "going"), state),
            "resumable": f"cannot be resumed: {state}",
            "symptom": "no remedy: nothing is seen to go wrong in this run",
            "samples": samples,
        }

    def _change(self, **changes: object) -> None:
        self.notice("")
        self.console.set_run_view(replace(self.console.run_view, **changes))  # type: ignore[arg-type]

    def action_pane(self) -> None:
        pane = PANES[(PANES.index(self.console.run_view.pane) + 1) % len(PANES)]
        self._change(pane=pane, scroll=0)

    def action_move(self, rows: int) -> None:
        view = self.console.run_view
        scroll = view.scroll - rows
        if view.pane == "output":
            most = len(view.snapshot.log_tail) if view.snapshot else 0
            self._change(scroll=min(max(0, scroll), most))
        elif view.pane != "closed":
            self._change(scroll=max(-200, min(0, scroll)))

    def action_logarithm(self) -> None:
        view = self.console.run_view
        large = large_chart(view)
        if large is None:
            return
        changed = not is_logarithmic(large, view)
        if changed and any(y <= 0 for series in large.series for _, y in series.points):
            self.notice("values of 0 or less have no logarithm", "bad")
        else:
            self._change(logarithmic=changed)

    def action_chart(self, places: int) -> None:
        """Make the next or the one before the large chart."""
        view = self.console.run_view
        many = len(charts_of(view))
        if many:
            self._change(chart=(view.chart + places) % many, logarithmic=None)

    def action_sample(self, newer: int) -> None:
        """Show a newer sampled text, or with a negative number an older one."""
        view = self.console.run_view
        most = len(view.snapshot.samples) - 1 if view.snapshot is not None else 0
        self._change(sample=min(max(0, view.sample - newer), max(0, most)), scroll=0)

    def action_zoom(self) -> None:
        self._change(recent=not self.console.run_view.recent)

    def action_glyphs(self) -> None:
        glyphs = self.console.run_view.glyphs
        self._change(glyphs=GLYPHS[(GLYPHS.index(glyphs) + 1) % len(GLYPHS)])

    def action_edit(self) -> None:
        run = self.console.run_view.snapshot
        if run is not None:
            self.console.edit_plan(run.given_plan)

    def action_stop(self) -> None:
        """Ask whether to save and stop, kill, or do nothing."""
        from memconsole.tui.screens.confirm import ConfirmAnswer, ConfirmScreen

        run = self.console.run_view.snapshot
        if run is None:
            return

        queued = run.state == "queued"

        def answered(value: object) -> None:
            if value == "stop":
                self._ask("stop", "cancelling the run" if queued else "asked the run to stop")
            elif value == "kill":
                self._ask("kill", "asked the run to end at once")

        heading = f"Stop run {run.name or run.id}?"
        if queued:
            words = f"cancel it; {self.shown_key('resume')} starts it"
            self.app.push_screen(ConfirmScreen(heading, (ConfirmAnswer("stop", words),)), answered)
            return
        answers = (
            ConfirmAnswer(
                "stop", f"save a checkpoint, then stop; {self.shown_key('resume')} resumes it"
            ),
            ConfirmAnswer("kill", "end at once; work since the last checkpoint is lost"),
        )
        self.app.push_screen(ConfirmScreen(heading, answers), answered)

    async def action_remedies(self) -> None:
        """List changes that would have lowered this run's memory; prepare a launch with the picked one."""
        from memconsole.tui.plan.dialogs.launching import ask_and_launch
        from memconsole.tui.run.remedies import choices_of, first_that_fits, found_remedies
        from memconsole.tui.screens.pick import PickScreen

        run = self.console.run_view.snapshot
        if run is None:
            return
        remedies, problem = await asyncio.to_thread(
            found_remedies, run.id, run.plan, self.console.devices
        )
        if not remedies:
            self.notice(problem or "no setting that this backend trains needs less memory", "bad")
            return

        def relaunch(value: object) -> None:
            if isinstance(value, str):
                changed = plans.replace(run.given_plan, remedies[int(value)].changes)
                name = f"{run.name}-again" if run.name else ""
                asking = ask_and_launch(self, changed, self.console.devices, name=name)
                self.run_worker(asking, exit_on_error=False)

        heading = f"{run.name or run.id} ran out of memory: relaunch with"
        self.app.push_screen(
            PickScreen(heading, choices_of(remedies), first_that_fits(remedies)), relaunch
        )

    def action_helps(self) -> None:
        """List the settings that act on what goes wrong; open the plan with the picked one."""
        from memconsole.tui.screens.pick import Choice, PickScreen

        run, symptom = self.console.run_view.snapshot, self.console.run_view.symptom
        if run is None or symptom is None:
            return

        def picked(value: object) -> None:
            if isinstance(value, str):
                changes = symptom.helps[int(value)].changes
                self.console.edit_plan(plans.replace(run.given_plan, changes))

        choices = [
            Choice(str(n), setting.label, setting.words, label_width=36)
            for n, setting in enumerate(symptom.helps)
        ]
        heading = f"{symptom.name.replace('_', ' ')}: open the plan with"
        self.app.push_screen(PickScreen(heading, choices), picked)

    def action_pause(self) -> None:
        """Pause the run after its current step."""
        self._ask("pause", "asked the run to pause after this step; its memory stays taken")

    def action_continue(self) -> None:
        """Let a paused run go on."""
        self._ask("continue", "asked the run to go on")

    def _ask(self, what: Order, words: str) -> None:
        run = self.console.run_view.snapshot
        if run is not None:
            self.notice(words)
            self.console.request(run.id, what)

    def action_resume(self) -> None:
        run = self.console.run_view.snapshot
        if run is not None:
            self.notice("resuming …")
            self.console.resume(run.id)
