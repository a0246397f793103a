"""The console: wires the screens to the rooms, follows one run, and leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import App
from textual.screen import Screen
from textual.theme import Theme
from textual.worker import get_current_worker

from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan, PlanError
from memconsole.sanitize import clean_line
from memconsole.tui.ink import cleaned
from memconsole.tui.messages import (
    ActionFailed,
    FollowFailed,
    Launched,
    LiveRunFound,
    PredictionReady,
    SnapshotArrived,
)
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.screens.plan import PlanScreen
from memconsole.tui.views import RunView

if TYPE_CHECKING:
    from memconsole.devices.probe import Probe

# Every colour is one of the 256 of xterm, so that terminals without true colour show the same.
DARK = Theme(
    name="memconsole-dark",
    primary="#5fafff",
    secondary="#87d7ff",
    accent="#ffaf5f",
    success="#87d787",
    warning="#ffd75f",
    error="#ff8787",
    foreground="#d0d0d0",
    background="#121212",
    surface="#1c1c1c",
    panel="#262626",
    dark=True,
)
LIGHT = Theme(
    name="memconsole-light",
    primary="#005faf",
    secondary="#005f87",
    accent="#af5f00",
    success="#005f00",
    warning="#875f00",
    error="#af0000",
    foreground="#262626",
    background="#ffffff",
    surface="#eeeeee",
    panel="#e4e4e4",
    dark=False,
)


class ConsoleApp(App[None], inherit_bindings=False):
    """State that outlives a screen lives here: the run being watched and the last probe reading."""

    CSS_PATH = Path(__file__).with_name("app.tcss")
    ENABLE_COMMAND_PALETTE = False
    TITLE = "memconsole"
    BINDINGS: ClassVar = []
    THEMES: ClassVar = (DARK.name, LIGHT.name, "ansi-dark", "ansi-light")

    def __init__(
        self,
        plan: Plan | None = None,
        attach: str | None = None,
        *,
        readonly: bool = False,
        ascii: bool = False,
        slow_link: bool | None = None,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.readonly = readonly
        self.ascii_only = ascii
        self.slow_link = "SSH_CONNECTION" in os.environ if slow_link is None else slow_link
        self.interval_seconds = 2.0 if self.slow_link else 1.0
        self.devices: Devices | None = None
        self.run_id = ""
        self.run_view = RunView()
        self._plan = plan
        self._attach_to = attach
        self._probe: Probe | None = None
        self._stop_following = threading.Event()
        self._snapshot_shown = threading.Event()
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = "ansi-dark" if self.slow_link else DARK.name

    def get_default_screen(self) -> Screen[object]:
        from memconsole.plan.catalog import default_plan

        return PlanScreen(self._plan or default_plan())

    # Life

    async def on_mount(self) -> None:
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.exit)
            self.set_interval(1.0, self._leave_without_terminal)
        self.call_after_refresh(self._start_probe)
        if self._attach_to is not None:
            await self.watch_run(self._attach_to)
        else:
            self._find_live_run()

    def on_unmount(self) -> None:
        self._stop_following.set()
        self._snapshot_shown.set()
        if self._probe is not None:
            self._probe.close()

    def _leave_without_terminal(self) -> None:
        """Standard input that hung up (a closed window, a dropped link) ends the console."""
        poll = select.poll()
        try:
            poll.register(sys.__stdin__.fileno() if sys.__stdin__ else 0, 0)
            gone = any(event & (select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
        except (OSError, ValueError):
            gone = True
        if gone:
            self.exit()

    @property
    def plan_screen(self) -> PlanScreen:
        """The screen at the bottom of the stack."""
        screen = self.screen_stack[0]
        assert isinstance(screen, PlanScreen)
        return screen

    # Devices

    def _start_probe(self) -> None:
        from memconsole.devices.probe import Probe

        self._probe = Probe()
        self._probe.start()
        self.set_interval(self.interval_seconds, self._look_at_devices)
        self.set_timer(0.3, self._look_at_devices)

    def _look_at_devices(self) -> None:
        devices = self._probe.latest() if self._probe is not None else None
        if devices is None or devices == self.devices:
            return
        self.set_devices(devices)

    def set_devices(self, devices: Devices) -> None:
        """A new reading reaches whoever is on screen."""
        self.devices = devices
        self.run_view = replace(self.run_view, devices=devices)
        for screen in self.screen_stack:
            changed = getattr(screen, "devices_changed", None)
            if changed is not None:
                changed(devices)

    # Following a run

    async def watch_run(self, reference: str) -> None:
        """Follow a run and show it."""
        self._stop_following.set()
        self._stop_following = threading.Event()
        self.run_id = reference
        self.run_view = RunView(devices=self.devices)
        self._follow(reference, self._stop_following)
        await self.action_show_run()

    @work(thread=True, exclusive=True, group="follow", exit_on_error=False)
    def _follow(self, reference: str, stop: threading.Event) -> None:
        """One frozen snapshot per tick, and none while the last one is not yet drawn."""
        from memconsole.runs.directory import RunError, find_run
        from memconsole.runs.follow import Follower

        try:
            run = find_run(reference)
            follower = Follower(run)
        except (RunError, PlanError, OSError) as error:
            self.post_message(FollowFailed(str(error)))
            return
        last = None
        while not stop.is_set():
            snapshot = follower.poll()
            if snapshot != last:
                last = snapshot
                self._snapshot_shown.clear()
                self.post_message(SnapshotArrived(snapshot))
                while not self._snapshot_shown.wait(0.5) and not stop.is_set():
                    pass
            stop.wait(self.interval_seconds)

    @on(SnapshotArrived)
    def _snapshot_arrived(self, message: SnapshotArrived) -> None:
        snapshot = message.snapshot
        view = self.run_view
        first = view.snapshot is None
        ended = view.live and not replace(view, snapshot=snapshot).live
        self.run_id = snapshot.id
        pane = view.pane
        if ended or (first and snapshot.state == "finished"):
            pane = "summary"
        self.set_run_view(replace(view, snapshot=snapshot, problem="", pane=pane))
        self._snapshot_shown.set()
        if first:
            self._predict(snapshot.id, snapshot.plan, self.devices)
        elif view.snapshot is not None and view.snapshot.state != snapshot.state:
            self.plan_screen.refresh_frame()

    @on(FollowFailed)
    def _follow_failed(self, message: FollowFailed) -> None:
        self.set_run_view(replace(self.run_view, problem=message.reason))

    def set_run_view(self, view: RunView) -> None:
        """The one place where the run view changes; the run screen follows if it is there."""
        from memconsole.tui.screens.run import RunScreen

        self.run_view = view
        for screen in self.screen_stack:
            if isinstance(screen, RunScreen):
                screen.show(view)

    @work(thread=True, exclusive=True, group="prediction", exit_on_error=False)
    def _predict(self, run_id: str, plan: Plan, devices: Devices | None) -> None:
        from memconsole.tui.predictions import predicted

        found, problem = predicted(run_id, plan, devices)
        if not get_current_worker().is_cancelled:
            self.post_message(PredictionReady(run_id, found, problem))

    @on(PredictionReady)
    def _prediction_ready(self, message: PredictionReady) -> None:
        if message.run_id == self.run_id:
            self.set_run_view(
                replace(
                    self.run_view,
                    prediction=message.estimate,
                    prediction_problem=message.problem,
                )
            )

    @work(thread=True, exclusive=True, group="live", exit_on_error=False)
    def _find_live_run(self) -> None:
        from memconsole.tui.runs_list import newest_live

        run = newest_live()
        if run is not None and not get_current_worker().is_cancelled:
            self.post_message(LiveRunFound(run.id))

    @on(LiveRunFound)
    async def _offer(self, message: LiveRunFound) -> None:
        """Go to a live run, unless the person has begun to plan or asked for a plan."""
        run_id = message.run_id
        if self.run_id:
            return
        if self._plan is None and not self.plan_screen.touched and len(self.screen_stack) == 1:
            await self.watch_run(run_id)
        else:
            self.run_id = run_id
            self.plan_screen.notice(f"run {run_id} is live; t shows it")
            self.plan_screen.refresh_frame()

    # Acting on runs

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def launch(self, plan: Plan) -> None:
        """Check, price and start `plan` as a run of its own."""
        from memconsole.runs.directory import RunError
        from memconsole.start import start

        try:
            run = start(plan, None, self.devices)
        except (PlanError, RunError, OSError) as error:
            self.post_message(ActionFailed(f"not launched: {error}"))
            return
        self.post_message(Launched(run.id, "launched"))

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def resume(self, run_id: str) -> None:
        """Start the next attempt of a run."""
        from memconsole.runs.directory import RunError, find_run
        from memconsole.runs.launch.local import resume

        try:
            number = resume(find_run(run_id))
        except (PlanError, RunError, OSError) as error:
            self.post_message(ActionFailed(f"not resumed: {error}"))
            return
        self.post_message(Launched(run_id, f"attempt {number} started"))

    @work(thread=True, group="control", exit_on_error=False)
    def request(self, run_id: str, what: str) -> None:
        """Ask a run to stop or end."""
        from memconsole.runs.control import request_kill, request_stop
        from memconsole.runs.directory import RunError, find_run

        try:
            ask = request_kill if what == "kill" else request_stop
            ask(find_run(run_id), "console")
        except (RunError, OSError) as error:
            self.post_message(ActionFailed(f"not asked to {what}: {error}"))

    @on(Launched)
    async def _launched(self, message: Launched) -> None:
        await self.watch_run(message.run_id)
        self.notice(message.words, "good")

    @on(ActionFailed)
    def _action_failed(self, message: ActionFailed) -> None:
        self.notice(message.reason, "bad")

    def notice(self, words: str, role: str = "accent") -> None:
        """One row on the screen that is up."""
        if isinstance(self.screen, ConsoleScreen):
            self.screen.notice(words, role)

    def edit_plan(self, plan: Plan) -> None:
        """Take a plan to the plan screen."""
        self.plan_screen.change(lambda _: plan)
        self.call_later(self.action_show_plan)

    def edit_plan_of(self, run_id: str) -> None:
        """Take a run's plan to the plan screen."""
        from memconsole.runs.directory import RunError, find_run

        try:
            plan = find_run(run_id).read_plan()
        except (PlanError, RunError, OSError) as error:
            self.notice(str(error), "bad")
            return
        self.edit_plan(plan)

    # Screens

    async def _show(self, screen: Screen[object] | None) -> None:
        """Exactly this screen over the plan, or none."""
        while len(self.screen_stack) > 1:
            await self.pop_screen()
        if screen is not None:
            await self.push_screen(screen)

    async def action_show_plan(self) -> None:
        await self._show(None)

    async def action_show_run(self) -> None:
        from memconsole.tui.screens.run import RunScreen

        if not self.run_id:
            self.notice("no run is being watched; l launches this plan, a lists all runs")
            return
        if not isinstance(self.screen, RunScreen):
            if self.run_view.snapshot is None and self._stop_following.is_set() is False:
                self._ensure_following()
            await self._show(RunScreen())

    def _ensure_following(self) -> None:
        """Start the follower of a run that was offered but not yet opened."""
        if not any(w.group == "follow" and not w.is_finished for w in self.workers):
            self._stop_following = threading.Event()
            self._follow(self.run_id, self._stop_following)

    async def action_show_runs(self) -> None:
        from memconsole.tui.screens.runs import RunsScreen

        await self._show(RunsScreen())

    async def action_show_devices(self) -> None:
        from memconsole.tui.screens.devices import DevicesScreen

        await self._show(DevicesScreen())

    def action_help(self) -> None:
        from memconsole.tui.screens.help import HelpScreen

        if isinstance(self.screen, ConsoleScreen):
            self.push_screen(HelpScreen(self.screen.SCREEN))

    def action_palette(self) -> None:
        """Pick any action that would do something on this screen now."""
        from memconsole.tui.screens.pick import Choice, PickScreen

        screen = self.screen
        if not isinstance(screen, ConsoleScreen):
            return
        rows = {
            key.id: key
            for key in screen.offered_keys()
            if key.id not in ("palette", "up", "down", "page-up", "page-down")
        }
        choices = [
            Choice(key.id, key.label or key.id, f"{key.shown} · {key.help}")
            for key in rows.values()
        ]

        async def picked(value: object) -> None:
            if isinstance(value, str) and value in rows:
                await screen.run_action(rows[value].action)

        self.push_screen(PickScreen("do something", choices), picked)

    def action_theme(self) -> None:
        """The next of the themes: dark, light, the terminal's own colours."""
        names = list(self.THEMES)
        at = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(at + 1) % len(names)]
        self.notice(f"colours: {self.theme}")

    def action_repaint(self) -> None:
        """Send the whole screen again."""
        self.screen.refresh(repaint=True, layout=True)
        for widget in self.screen.query("*"):
            widget.refresh()

    def action_leave(self) -> None:
        """Leave; runs go on."""
        self.exit()


def run_console(
    plan: Plan | None = None,
    attach: str | None = None,
    *,
    readonly: bool = False,
    ascii: bool = False,
    slow_link: bool | None = None,
) -> int:
    """Open the console until the person leaves; then say how to come back. Returns the exit code."""
    ascii = ascii or not _draws_unicode()
    app = ConsoleApp(plan, attach, readonly=readonly, ascii=ascii, slow_link=slow_link)
    app.run(mouse=False)
    with contextlib.suppress(OSError):
        for line in parting_words(app.run_view, app.ascii_only):
            print(line)
        sys.stdout.flush()
    return app.return_code or 0


def parting_words(view: RunView, ascii_only: bool = False) -> list[str]:
    """What is printed on the plain terminal afterwards: the run goes on, and the way back."""
    run = view.snapshot
    if run is None:
        return []
    run_id = clean_line(run.id)
    if view.live:
        name = f"{run.name} ({run_id})" if run.name and run.name != run.id else run_id
        lines = [
            f"The run goes on: {name}, {run.phase}, step {run.step:,}",
            f"  memconsole attach {run_id}   shows it again",
            f"  memconsole stop {run_id}     saves a checkpoint and stops it",
        ]
    else:
        reason = run.verdict.reason.replace("_", " ") if run.verdict else run.state
        lines = [f"Run {run_id}: {reason}, step {run.step:,}"]
        lines.append(f"  memconsole report {run_id}   shows its figures")
        if view.resumable:
            lines.append(f"  memconsole resume {run_id}   goes on from its last checkpoint")
    return [cleaned(line, ascii_only) for line in lines]


def _draws_unicode() -> bool:
    """Whether the terminal can be expected to draw more than ASCII."""
    encoding = (getattr(sys.__stdout__, "encoding", "") or "").lower().replace("-", "")
    return encoding == "utf8" and os.environ.get("TERM", "") not in ("linux", "dumb", "vt100")
