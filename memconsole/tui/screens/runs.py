"""All runs, live first."""

from __future__ import annotations

import time

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.worker import get_current_worker

from memconsole.runs.snapshot import LIVE
from memconsole.tui.ink import Line, Span, fit, left, right
from memconsole.tui.keys import bindings
from memconsole.tui.messages import RunsListed
from memconsole.tui.runs_list import RunStatus, list_statuses
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.widgets.choice_list import ChoiceList
from memconsole.tui.widgets.text_lines import TextLines
from memconsole.tui.words import age_word, state_mark, state_word


def _widths(width: int) -> tuple[int, int]:
    """Cells for the name, and for the backend where there is room for it."""
    backend = 6 if width >= 90 else 0
    return max(12, width - 58 - backend), backend


def run_line(run: RunStatus, width: int, now: float) -> Line:
    """One run as a row."""
    mark, role = state_mark(run)
    steps = f"{run.step:,}" + (f"/{run.total_steps:,}" if run.total_steps else "")
    loss = "—" if run.loss is None else f"{run.loss:.3f}"
    name, backend = _widths(width)
    line: Line = [
        Span(f"{mark} {left(state_word(run), 12)} ", role),
        Span(left(run.name or run.id, name) + " ", "strong"),
        Span(left(f"{run.model}", 10) + " "),
        Span(left(run.backend, backend), "dim"),
        Span(right(steps, 12)),
        Span(right(loss, 8), "train"),
    ]
    return [*line, Span("  " + age_word(max(0.0, now - run.created_wall)), "dim")]


class RunsScreen(ConsoleScreen, inherit_bindings=False):
    """Listed again every few seconds, in a worker."""

    SCREEN = "runs"
    BINDINGS = bindings("runs")

    def __init__(self) -> None:
        super().__init__()
        self._runs: tuple[RunStatus, ...] = ()
        self._notes: tuple[str, ...] = ("looking for runs …",)
        self._cursor = 0

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield TextLines(id="head")
            yield ChoiceList(id="list")

    def on_mount(self) -> None:
        self._show()
        self._list()
        self.set_interval(2.0 * self.console.interval_seconds, self._list)

    @work(thread=True, exclusive=True, group="runs", exit_on_error=False)
    def _list(self) -> None:
        runs, notes = list_statuses()
        if not get_current_worker().is_cancelled:
            self.post_message(RunsListed(runs, notes))

    @on(RunsListed)
    def _listed(self, message: RunsListed) -> None:
        chosen = self._selected()
        self._runs, self._notes = message.runs, message.notes
        ids = [run.id for run in self._runs]
        self._cursor = ids.index(chosen.id) if chosen and chosen.id in ids else 0
        self._show()

    def _selected(self) -> RunStatus | None:
        return self._runs[self._cursor] if self._cursor < len(self._runs) else None

    def _show(self) -> None:
        if not self.composed:
            return
        width = max(20, self.size.width - 2)
        now = time.time()
        name, backend = _widths(width)
        head = f"    {left('state', 13)}{left('run', name + 1)}{left('model', 11)}{' ' * backend}"
        head += right("step", 12) + right("loss", 8) + "  started"
        self.query_one("#head", TextLines).show([[Span(fit(head, width + 2), "dim")]])
        empty = " · ".join(self._notes) or "no runs yet; l on the plan screen launches one"
        rows = [run_line(run, width, now) for run in self._runs]
        self.query_one(ChoiceList).show(rows, self._cursor, empty)
        self.refresh_frame()

    def on_resize(self) -> None:
        self._show()

    def title_line(self) -> tuple[str, str]:
        live = sum(run.state in LIVE for run in self._runs)
        return "all runs", f"{live} live, {len(self._runs)} in all"

    def conditions(self) -> set[str]:
        found = super().conditions()
        run = self._selected()
        if run is not None:
            found.add("run")
            if run.state not in LIVE and run.state != "finished":
                found.add("resumable")
        return found

    def action_move(self, rows: int) -> None:
        if self._runs:
            self._cursor = min(max(0, self._cursor + rows), len(self._runs) - 1)
            self._show()

    async def action_open(self) -> None:
        run = self._selected()
        if run is not None:
            await self.console.watch_run(run.id)

    def action_resume(self) -> None:
        run = self._selected()
        if run is not None:
            self.notice(f"resuming {run.name or run.id} …")
            self.console.resume(run.id)

    def action_edit(self) -> None:
        run = self._selected()
        if run is not None:
            self.console.edit_plan_of(run.id)

    async def action_back(self) -> None:
        await self.console.action_show_plan()
