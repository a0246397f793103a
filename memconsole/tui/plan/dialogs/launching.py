"""Asks for the name of a new run, and shows what the run will do before it starts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from memconsole.announcing import after_words, default_name, free_name, launch_rows
from memconsole.devices.reading import Devices
from memconsole.memory.table import Estimate
from memconsole.memory.verdict import Verdict
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.act.waiting import check_after, is_going
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.names import check_name
from memconsole.runs.record.run_store import list_runs
from memconsole.tui.draw.lines import Line, Span, left, wrap
from memconsole.tui.draw.words import VERDICTS
from memconsole.tui.keys.rows import bindings
from memconsole.tui.plan.pricing import calibrated
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.screens.prompt import PromptScreen
from memconsole.tui.widgets.text_lines import TextLines

if TYPE_CHECKING:
    from memconsole.memory.estimate import Lookup

_HEAD = 9


class Start(NamedTuple):
    """When a run starts, and what is estimated for it then."""

    after: RunDirectory | None
    """The run that is to end first; None: it starts now."""
    estimate: Estimate

    @property
    def words(self) -> str:
        return "now" if self.after is None else after_words(self.after)


class Launch(NamedTuple):
    """The answer of the dialog."""

    name: str
    after: RunDirectory | None


def launchable(plan: Plan, devices: Devices | None, lookup: Lookup | None) -> Estimate:
    """The estimate of a plan that can be launched, as the plan screen shows it. Raises `PlanError`."""
    from memconsole.start import check_launch

    return calibrated(plan, check_launch(plan, devices, lookup))


def starts(plan: Plan, devices: Devices | None, lookup: Lookup | None) -> tuple[Start, ...]:
    """When the plan can start: now, or after each live run of this machine, the newest first. Raises `PlanError`."""
    from memconsole.start import devices_then

    now = Start(None, launchable(plan, devices, lookup))
    if plan.launch.on != "here":
        return (now,)
    live = [run for run in list_runs() if is_going(run) and _may_follow(plan, run)]
    if not live:
        return (now,)
    later = launchable(plan, devices_then(devices, live[0]), lookup)
    return (now, *(Start(run, later) for run in live))


def _may_follow(plan: Plan, run: RunDirectory) -> bool:
    try:
        check_after(plan, run)
    except RunError:
        return False
    return True


async def ask_and_launch(
    on: ConsoleScreen,
    plan: Plan,
    devices: Devices | None,
    lookup: Lookup | None = None,
    name: str = "",
) -> None:
    """Ask on top of the screen `on` for the name of a new run, show what it will do, and launch it."""
    try:
        screen = LaunchScreen(plan, await asyncio.to_thread(starts, plan, devices, lookup), name)
    except (PlanError, RunError) as error:
        on.notice(f"not launched: {error}", "bad")
        return

    def answered(value: object) -> None:
        if isinstance(value, Launch):
            on.notice("launching …")
            on.console.launch(plan, *value)

    on.app.push_screen(screen, answered)


class LaunchScreen(PromptScreen, inherit_bindings=False):
    """Closes with a `Launch`, or with None. A plan that is tight or does not fit is refused once."""

    SCREEN = "launch"
    BINDINGS = bindings("launch")

    def __init__(self, plan: Plan, starts: tuple[Start, ...], name: str = "") -> None:
        """Proposes `name`; if it is empty, a name made from what is trained. The first of `starts` is chosen."""
        proposed = free_name(name) if name else default_name(plan)
        super().__init__("launch: name of the run", proposed, "", self._refused)
        self._plan, self._starts, self._chosen = plan, starts, 0
        self._warned = False

    @property
    def _start(self) -> Start:
        return self._starts[self._chosen]

    @property
    def _verdict(self) -> Verdict:
        return self._start.estimate.table.verdict

    def conditions(self) -> set[str]:
        return super().conditions() | ({"others run"} if len(self._starts) > 1 else set())

    def action_later(self) -> None:
        self._chosen = (self._chosen + 1) % len(self._starts)
        self._warned, self._problem = False, ""
        self.redraw()

    def answer(self, word: str) -> Launch:
        return Launch(word, self._start.after)

    def _refused(self, word: str) -> str | None:
        try:
            check_name(word.strip())
        except RunError as error:
            return str(error)
        if self._verdict is Verdict.FITS or self._warned:
            return None
        self._warned = True
        what = "is tight" if self._verdict is Verdict.TIGHT else "does not fit"
        return f"this plan {what}; {self.shown_key('accept')} again starts it anyway"

    def title_line(self) -> tuple[str, str]:
        take, leave = self.shown_key("accept"), self.shown_key("dismiss")
        return self.heading, f"{take} starts it, {leave} cancels"

    def draw_body(self) -> None:
        width = max(20, self.size.width - 4)
        lines: list[Line] = []
        rows = launch_rows(self._plan, self._start.estimate)
        if len(self._starts) > 1:
            rows = (("start", self._start.words), *rows)
        for name, words in rows:
            unsure = name == "memory" and self._verdict is not Verdict.FITS
            role = VERDICTS[self._verdict][1] if unsure else ""
            for n, text in enumerate(wrap(words, width - _HEAD, 3)):
                head = left(name if n == 0 else "", _HEAD)
                lines.append([Span(head, "dim"), Span(text, role)])
        lines.append([])
        lines += [[Span(text, "bad")] for text in wrap(self._problem, width, 3)]
        self.part(TextLines, "about").show(lines)
