"""The list of all runs, live first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from textual import events, on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input
from textual.worker import get_current_worker

from memconsole.errors import UserError
from memconsole.runs.read.shown.missing import MARK
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.read.shown.words import state_word
from memconsole.runs.record import labels
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.names import rename_run
from memconsole.runs.record.run_store import find_run, runs_root
from memconsole.runs.record.states import LIVE
from memconsole.tui.draw.comparing_runs import MOST_RUNS
from memconsole.tui.keys.rows import bindings
from memconsole.tui.runs.rows import detail_lines, filtered, head_line, run_line
from memconsole.tui.runs.runs_list import RunList, list_statuses
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.widgets.choice_list import ChoiceList
from memconsole.tui.widgets.entry import Entry
from memconsole.tui.widgets.text_lines import TextLines


@dataclass
class RunsListed(Message, bubble=False):
    """The runs, and how long it took to list them."""

    found: RunList
    seconds: float


@dataclass
class RunDeleted(Message, bubble=False):
    """A run's files were deleted, or `problem` says why not."""

    run_id: str
    name: str
    problem: str


class RunsScreen(ConsoleScreen, inherit_bindings=False):
    """Lists the runs again every few seconds, in a worker."""

    SCREEN = "runs"
    BINDINGS = bindings("runs")

    def __init__(self) -> None:
        super().__init__()
        self._runs: tuple[RunStatus, ...] = ()
        self._total = 0
        """How many runs there are; not all may be listed."""
        self._notes: tuple[str, ...] = ("looking for runs …",)
        self._due = 0.0
        """When the runs may be listed again, by the monotonic clock."""
        self._shown: tuple[RunStatus, ...] = ()
        """The runs that pass the filter."""
        self._filter = ""
        self._typing = False
        """Whether keys are words of the filter, and not actions."""
        self._ending = False
        """Whether the words end with a key that the entry has not handled yet."""
        self._marked: frozenset[str] = frozenset()
        self._cursor = 0

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Entry(placeholder="words to look for", id="filter")
            yield TextLines(id="head")
            yield ChoiceList(id="list")
            yield TextLines(id="about-run")

    def on_mount(self) -> None:
        self._list()
        self.set_interval(2.0 * self.console.interval_seconds, self._list_again)

    def _list_again(self) -> None:
        """List the runs unless they are being listed, and at most half of the time."""
        listing = any(w.group == "runs" and not w.is_finished for w in self.workers)
        if not listing and time.monotonic() >= self._due:
            self._list()

    @work(thread=True, exclusive=True, group="runs", exit_on_error=False)
    def _list(self) -> None:
        begun = time.monotonic()
        found = list_statuses()
        if not get_current_worker().is_cancelled:
            self.post_message(RunsListed(found, time.monotonic() - begun))

    @on(RunsListed)
    def _listed(self, message: RunsListed) -> None:
        chosen = self._selected()
        self._due = time.monotonic() + message.seconds
        self._runs, self._total, self._notes = message.found
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
        self.part(TextLines, "head").show([head_line(width)])
        chosen = self._selected()
        self.part(TextLines, "about-run").show(detail_lines(chosen, width) if chosen else [])
        launch = self.shown_key("launch", "plan")
        empty = " · ".join(self._notes) or f"no runs yet; {launch} on the plan screen launches one"
        if self._filter and self._runs:
            empty = f"no run holds {self._filter!r}; {self.shown_key('dismiss')} shows all"
        rows = [run_line(run, width, now, run.id in self._marked) for run in self._shown]
        self.part(ChoiceList).show(rows, self._cursor, empty)

    def title_line(self) -> tuple[str, str]:
        live = sum(run.state in LIVE for run in self._runs)
        shown = len(self._runs)
        words = f"{live} live, {f'{shown} of ' if shown < self._total else ''}{self._total} in all"
        if damaged := sum(bool(run.missing_records) for run in self._runs):
            words = f"{MARK} {damaged} with missing records, {words}"
        if self._marked:
            words = f"{len(self._marked)} marked, {words}"
        return "all runs", words

    def conditions(self) -> set[str]:
        conditions = super().conditions()
        run = self._selected()
        if run is not None:
            conditions.add("run")
            if run.resumable:
                conditions.add("resumable")
            if run.state not in LIVE and run.state != "orphaned":
                conditions.add("deletable")
        if len(self._to_compare()) > 1:
            conditions.add("comparable")
        return conditions

    def reasons(self) -> dict[str, str]:
        run = self._selected()
        compare = f"mark two runs or more with {self.shown_key('mark')}"
        if run is None:
            words = dict.fromkeys(("run", "resumable", "deletable"), "no run is selected")
            return {**words, "comparable": compare}
        state = f"the run is {state_word(run)}"
        orphaned = run.state == "orphaned"
        ends = f"memconsole stop {run.id} --kill ends its children" if orphaned else "stop it first"
        return {
            "resumable": f"cannot be resumed: {state}",
            "deletable": f"cannot be deleted: {state}; {ends}",
            "comparable": compare,
        }

    @on(ChoiceList.Clicked)
    def _clicked(self, message: ChoiceList.Clicked) -> None:
        """A click selects a run; a click on the selected one opens it."""
        message.stop()
        self._cursor = min(message.row, max(0, len(self._shown) - 1))
        self.redraw()
        if message.again:
            self.app.call_later(self.action_open)  # it removes this screen

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
        self._typing = True
        entry = self.part(Entry)
        entry.display = True
        self.set_focus(entry)

    def typed_early(self, event: events.Key) -> bool:
        early = self._typing and Entry.takes(event)
        if early and not self._ending:
            self._ending = event.key == "enter"
            self.part(Entry).take(event)
        return early

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._filter = event.value
        self._narrow(self._selected())

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._typing = self._ending = False
        self.part(Entry).display = bool(self._filter.strip())
        self.set_focus(None)

    def _clear_filter(self) -> bool:
        """Clear the filter; returns whether there was one."""
        entry = self.part(Entry)
        there = bool(entry.display)
        self._typing = self._ending = False
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

    # Name, tags and note

    def action_rename(self) -> None:
        self._ask(
            "rename",
            "A name to tell the run by. Its id and its files stay as they are, also while it trains.",
            lambda run: run.name,
            lambda run, text: rename_run(run, text, os.environ),
        )

    def action_tags(self) -> None:
        def change(run: RunDirectory, text: str) -> None:
            now, words = labels.read_labels(run.path).tags, text.split()
            labels.tag(run.path, words, set(now) - set(words), os.environ)

        self._ask(
            "tags",
            "Words that group runs, with spaces between them. The filter finds them.",
            lambda run: " ".join(run.tags),
            change,
        )

    def action_note(self) -> None:
        self._ask(
            "note",
            "What you want to know about this run later. An empty text removes the note.",
            lambda run: " ".join(run.note.split()),
            lambda run, text: labels.note(run.path, text, os.environ),
        )

    def _ask(
        self,
        what: str,
        about: str,
        present: Callable[[RunStatus], str],
        write: Callable[[RunDirectory, str], object],
    ) -> None:
        """Prompt for a text about the selected run and keep it in the run's directory."""
        from memconsole.tui.screens.prompt import PromptScreen

        run = self._selected()
        if run is None:
            return

        def refusal(text: str) -> str | None:
            try:
                write(find_run(run.id), text)
            except (UserError, OSError) as error:
                return str(error)
            return None

        def answered(value: object) -> None:
            if value is not None:
                self._list()

        screen = PromptScreen(f"{what} · {run.name}", present(run), about, refusal)
        self.app.push_screen(screen, answered)

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

        gone = "its checkpoints, log and figures are gone for good"
        if begun := [other.name for other in self._runs if other.begun_from == run.id]:
            gone += f"; {len(begun)} runs started from its weights: {', '.join(begun)}"
        answer = ConfirmAnswer("delete", gone)
        question = f"Delete run {run.name}, {state_word(run)} at step {run.step:,}?"
        self.app.push_screen(ConfirmScreen(question, (answer,)), answered)

    @work(thread=True, group="delete", exit_on_error=False)
    def _delete(self, run: RunStatus) -> None:
        from memconsole.runs.act.delete import delete_run
        from memconsole.runs.record.directory import RunError

        try:
            delete_run(RunDirectory(runs_root() / run.id))
        except (RunError, OSError) as error:
            self.post_message(RunDeleted(run.id, run.name, str(error)))
        else:
            self.post_message(RunDeleted(run.id, run.name, ""))

    @on(RunDeleted)
    def _deleted(self, message: RunDeleted) -> None:
        if message.problem:
            self.notice(message.problem, "bad")
        else:
            self.console.forget_run(message.run_id)
            self.notice(f"deleted {message.name}", "good")
        self._list()

    async def action_back(self) -> None:
        if self._clear_filter():
            return
        await self.console.action_go_back()
