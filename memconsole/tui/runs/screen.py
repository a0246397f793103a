"""The list of all runs, live first."""

from __future__ import annotations

import time
from dataclasses import dataclass

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input
from textual.worker import get_current_worker

from memconsole.runs.read.missing import MARK
from memconsole.runs.record.states import LIVE
from memconsole.tui.draw.comparing import MOST_RUNS
from memconsole.tui.draw.ink import Line, Span, fit, left, right
from memconsole.tui.draw.words import age_word, state_mark, state_word
from memconsole.tui.keys.rows import bindings
from memconsole.tui.runs.runs_list import RunStatus, list_statuses
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.widgets.choice_list import ChoiceList
from memconsole.tui.widgets.entry import Entry
from memconsole.tui.widgets.text_lines import TextLines


@dataclass
class RunsListed(Message, bubble=False):
    """Every run, live first."""

    runs: tuple[RunStatus, ...]
    notes: tuple[str, ...]


@dataclass
class RunDeleted(Message, bubble=False):
    """A run's files were deleted, or `problem` says why not."""

    run_id: str
    problem: str


def _widths(width: int) -> tuple[int, int]:
    """Cells for the name, and for the backend if there is room."""
    backend = 6 if width >= 90 else 0
    return max(12, width - 58 - backend), backend


def filtered(runs: tuple[RunStatus, ...], text: str) -> tuple[RunStatus, ...]:
    """The runs that contain every word of `text`."""
    words = text.lower().split()
    return tuple(
        run
        for run in runs
        if all(
            word in f"{run.id} {run.name} {state_word(run)} {run.model} {run.backend}".lower()
            for word in words
        )
    )


def run_line(run: RunStatus, width: int, now: float, marked: bool = False) -> Line:
    """One run as a row."""
    mark, role = state_mark(run)
    steps = f"{run.step:,}" + (f"/{run.total_steps:,}" if run.total_steps else "")
    loss = "—" if run.loss is None else f"{run.loss:.3f}"
    loss += MARK if run.missing_records else ""
    name, backend = _widths(width)
    line: Line = [
        Span(f"{mark} {left(state_word(run), 11)}", role),
        Span("◆ " if marked else "  ", "accent"),
        Span(left(run.name or run.id, name) + " ", "strong"),
        Span(left(f"{run.model}", 10) + " "),
        Span(left(run.backend, backend), "dim"),
        Span(right(steps, 12)),
        Span(right(loss, 8), "train"),
    ]
    return [*line, Span("  " + age_word(max(0.0, now - run.created_wall)), "dim")]


class RunsScreen(ConsoleScreen, inherit_bindings=False):
    """Lists the runs again every few seconds, in a worker."""

    SCREEN = "runs"
    BINDINGS = bindings("runs")

    def __init__(self) -> None:
        super().__init__()
        self._runs: tuple[RunStatus, ...] = ()
        self._notes: tuple[str, ...] = ("looking for runs …",)
        self._shown: tuple[RunStatus, ...] = ()
        """The runs that pass the filter."""
        self._filter = ""
        self._marked: frozenset[str] = frozenset()
        self._cursor = 0

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Entry(placeholder="words to look for", id="filter")
            yield TextLines(id="head")
            yield ChoiceList(id="list")

    def on_mount(self) -> None:
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
        self._marked &= {run.id for run in self._runs}
        self._narrow(chosen)

    def _narrow(self, chosen: RunStatus | None) -> None:
        """Apply the filter; the selected run stays selected if it passes."""
        self._shown = filtered(self._runs, self._filter)
        ids = [run.id for run in self._shown]
        kept = chosen is not None and chosen.id in ids
        self._cursor = (
            ids.index(chosen.id)
            if chosen is not None and kept
            else min(self._cursor, max(0, len(ids) - 1))
        )
        self.redraw()

    def _selected(self) -> RunStatus | None:
        return self._shown[self._cursor] if self._cursor < len(self._shown) else None

    def draw_body(self) -> None:
        width = max(20, self.size.width - 2)
        now = time.time()
        name, backend = _widths(width)
        head = f"    {left('state', 13)}{left('run', name + 1)}{left('model', 11)}{' ' * backend}"
        head += right("step", 12) + right("loss", 8) + "  started"
        self.part(TextLines, "head").show([[Span(fit(head, width + 2), "dim")]])
        launch = self.shown_key("launch", "plan")
        empty = " · ".join(self._notes) or f"no runs yet; {launch} on the plan screen launches one"
        if self._filter and self._runs:
            empty = f"no run holds {self._filter!r}; {self.shown_key('dismiss')} shows all"
        rows = [run_line(run, width, now, run.id in self._marked) for run in self._shown]
        self.part(ChoiceList).show(rows, self._cursor, empty)

    def title_line(self) -> tuple[str, str]:
        live = sum(run.state in LIVE for run in self._runs)
        words = f"{live} live, {len(self._runs)} in all"
        if damaged := sum(bool(run.missing_records) for run in self._runs):
            words = f"{MARK} {damaged} with missing records, {words}"
        if self._marked:
            words = f"{len(self._marked)} marked, {words}"
        return "all runs", words

    def conditions(self) -> set[str]:
        found = super().conditions()
        run = self._selected()
        if run is not None:
            found.add("run")
            if run.state not in LIVE and run.state != "finished":
                found.add("resumable")
            if run.state not in LIVE and run.state != "orphaned":
                found.add("deletable")
        if len(self._to_compare()) > 1:
            found.add("comparable")
        return found

    def action_move(self, rows: int) -> None:
        if self._shown:
            self._cursor = min(max(0, self._cursor + rows), len(self._shown) - 1)
            self.redraw()

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

    # Filter

    def action_filter(self) -> None:
        """Type words; enter goes back to the list, escape shows every run again."""
        entry = self.part(Entry)
        entry.display = True
        entry.focus()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._filter = event.value
        self._narrow(self._selected())

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.part(Entry).display = bool(self._filter.strip())
        self.set_focus(None)

    def _clear_filter(self) -> bool:
        """Clear the filter; returns whether there was one."""
        entry = self.part(Entry)
        there = bool(entry.display)
        entry.value, entry.display = "", False
        self.set_focus(None)
        return there

    # Comparing

    def action_mark(self) -> None:
        run = self._selected()
        if run is None:
            return
        if run.id not in self._marked and len(self._marked) >= MOST_RUNS:
            words = f"at most {MOST_RUNS} runs are compared; {self.shown_key('mark')} unmarks one"
            self.notice(words, "warn")
            return
        self.notice("")
        self._marked ^= {run.id}
        self.action_move(1)

    def _to_compare(self) -> tuple[str, ...]:
        """The marked runs; if only one is marked, the selected run too."""
        ids = [run.id for run in self._runs if run.id in self._marked]
        run = self._selected()
        if len(ids) == 1 and run is not None and run.id not in ids:
            ids.append(run.id)
        return tuple(ids)

    def action_compare(self) -> None:
        from memconsole.tui.runs.compare import CompareRunsScreen

        self.app.push_screen(CompareRunsScreen(self._to_compare()))

    # Deleting

    def action_delete(self) -> None:
        """Ask, then remove the run's files in a worker."""
        from memconsole.tui.screens.confirm import ConfirmAnswer, ConfirmScreen

        run = self._selected()
        if run is None:
            return

        def answered(value: object) -> None:
            if value == "delete":
                self._delete(run)

        answer = ConfirmAnswer("delete", "its checkpoints, log and figures are gone for good")
        question = f"Delete run {run.name or run.id}, {run.state} at step {run.step:,}?"
        self.app.push_screen(ConfirmScreen(question, (answer,)), answered)

    @work(thread=True, group="delete", exit_on_error=False)
    def _delete(self, run: RunStatus) -> None:
        from memconsole.runs.act.delete import delete_run
        from memconsole.runs.record.directory import RunError, find_run

        try:
            delete_run(find_run(run.id))
        except (RunError, OSError) as error:
            self.post_message(RunDeleted(run.id, str(error)))
        else:
            self.post_message(RunDeleted(run.id, ""))

    @on(RunDeleted)
    def _deleted(self, message: RunDeleted) -> None:
        if message.problem:
            self.notice(message.problem, "bad")
        else:
            self.console.forget_run(message.run_id)
            self.notice(f"deleted {message.run_id}", "good")
        self._list()

    async def action_back(self) -> None:
        if self._clear_filter():
            return
        await self.console.action_show_plan()
