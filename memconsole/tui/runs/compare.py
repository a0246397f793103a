"""Compares runs: overlaid loss curves, figures, and the settings that differ."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message

from memconsole.plan.plan import PlanError
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record.states import LIVE
from memconsole.tui.draw.axes import Axes
from memconsole.tui.draw.comparing_runs import MOST_RUNS, chart_lines, run_rows
from memconsole.tui.draw.lines import Line, Span
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.painted import Painted
from memconsole.tui.widgets.text_lines import TextLines


@dataclass
class RunsRead(Message, bubble=False):
    """The current state of the compared runs, and why one could not be read."""

    runs: tuple[RunSnapshot, ...]
    problem: str


class CurvesOverEachOther(Painted):
    """The curves of up to four runs."""

    _runs: tuple[RunSnapshot, ...] = ()
    _validation = False
    _logarithmic = False
    _other_key = ""
    _axes: Axes | None = None

    def show(
        self, runs: Sequence[RunSnapshot], validation: bool, logarithmic: bool, other_key: str
    ) -> None:
        if validation != self._validation:
            self._axes = None
        self._runs, self._validation, self._logarithmic = tuple(runs), validation, logarithmic
        self._other_key = other_key
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        lines, self._axes = chart_lines(
            self._runs,
            width,
            height,
            validation=self._validation,
            logarithmic=self._logarithmic,
            glyphs="ascii" if self.ascii_only else "braille",
            other_key=self._other_key,
            previous=self._axes,
        )
        return lines


class CompareRunsScreen(ConsoleModal, inherit_bindings=False):
    """Reads the runs again while one of them is live."""

    SCREEN = "compare"
    BINDINGS = bindings("compare")

    def __init__(self, ids: Sequence[str]) -> None:
        super().__init__()
        self._ids = tuple(ids)[:MOST_RUNS]
        self._runs: tuple[RunSnapshot, ...] = ()
        self._validation = False
        self._logarithmic = False
        self._gone = threading.Event()

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield CurvesOverEachOther(id="curves")
            yield TextLines(id="text")

    def on_mount(self) -> None:
        self._follow()

    def on_unmount(self) -> None:
        self._gone.set()

    @work(thread=True, exclusive=True, group="compare", exit_on_error=False)
    def _follow(self) -> None:
        """Read the runs once, and then at each tick while one is live."""
        from memconsole.runs.read.follow import Follower
        from memconsole.runs.record.directory import RunError
        from memconsole.runs.record.run_store import find_run

        followers, problem = [], ""
        for name in self._ids:
            try:
                followers.append(Follower(find_run(name)))
            except (RunError, PlanError, OSError) as error:
                problem = str(error)
        last: tuple[RunSnapshot, ...] = ()
        while not self._gone.is_set():
            now = tuple(follower.poll() for follower in followers)
            if now != last or problem:
                last = now
                self.post_message(RunsRead(now, problem))
            if all(run.state not in LIVE for run in now):
                return
            self._gone.wait(2 * self.console.interval_seconds)

    @on(RunsRead)
    def _read(self, message: RunsRead) -> None:
        self._runs = message.runs
        if message.problem:
            self.notice(message.problem, "bad")
        self.redraw()

    def draw_body(self) -> None:
        text = self.part(TextLines, "text")
        if not self._runs:
            text.show([[Span(" reading the runs …", "dim")]])
            return
        other = self.shown_key("other-loss")
        curves = self.part(CurvesOverEachOther)
        curves.show(self._runs, self._validation, self._logarithmic, other)
        rows = run_rows(self._runs, max(20, self.size.width - 1))
        text.styles.height = min(len(rows), self.size.height // 2)
        text.show(rows)

    def title_line(self) -> tuple[str, str]:
        return "runs side by side", f"{len(self._ids)} runs"

    def action_move(self, rows: int) -> None:
        self.part(TextLines, "text").scroll_by(rows)

    def action_logarithm(self) -> None:
        self._logarithmic = not self._logarithmic
        self.redraw()

    def action_other_loss(self) -> None:
        self._validation = not self._validation
        self.redraw()
