"""The console app: its screens, the device probe, and restoring the terminal on exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual import on, work
from textual.screen import Screen
from textual.worker import get_current_worker

from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.app.background import shell_waits, to_background
from memconsole.tui.app.clicks import ClickDriver
from memconsole.tui.app.closing import closing_words, draws_unicode
from memconsole.tui.app.messages import ExactNews, LiveRunFound
from memconsole.tui.app.navigating import NavigatingApp
from memconsole.tui.app.remembered import Remembered, remember, remembered
from memconsole.tui.draw.themes import DARK, LIGHT
from memconsole.tui.keys.keymap import Keymap, read_keymap
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.plan.screen import PlanScreen
from memconsole.tui.screens.base import ConsoleScreen

if TYPE_CHECKING:
    from textual.driver import Driver

    from memconsole.devices.probe import Probe
    from memconsole.memory.tracers.exact_book import ExactBook
    from memconsole.tui.screens.console import Console

FIRST_CHECK_SECONDS = 0.1
"""Seconds between two checks for the probe's first reading."""
STARTED_SECONDS = 2.0
"""Seconds after which the console has started: its screen is drawn and the first estimate is shown."""


class ConsoleApp(NavigatingApp, inherit_bindings=False):
    """Holds what outlives a screen: the probe's last reading and, inherited, the watched run."""

    CSS_PATH = Path(__file__).with_name("app.tcss")
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
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
        keymap: Keymap | None = None,
        chosen: Remembered | None = None,
    ) -> None:
        super().__init__(
            slow_link="SSH_CONNECTION" in os.environ if slow_link is None else slow_link,
            keys=keymap.table if keymap is not None else KeyTable(),
        )
        self._keymap_notice = keymap.notice if keymap is not None else ""
        self.animation_level = "none"
        self.readonly = readonly
        self.ascii_only = ascii
        self._plan = plan
        self._attach_to = attach
        self._probe: Probe | None = None
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.chosen = chosen if chosen is not None else Remembered()
        self.theme = "ansi-dark" if self.slow_link else DARK.name
        if self.chosen.theme in self.THEMES:
            self.theme = self.chosen.theme
        if self.no_color:
            self.theme = "ansi-dark"  # marks by attributes what other themes mark by colours

    def get_default_screen(self) -> Screen[object]:
        from memconsole.plan.catalog import default_plan

        return PlanScreen(self._plan or default_plan(), self.keys)

    # Life

    async def on_mount(self) -> None:
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.exit)
            self.set_interval(1.0, self._leave_without_terminal)
            # What the start has built stays. A full collection takes 40 to 130 ms with it, and a few without it.
            self.set_timer(STARTED_SECONDS, gc.freeze)
        self.set_keymap(self.keys.keymap())
        if self._keymap_notice:
            self.call_after_refresh(self.plan_screen.notice, self._keymap_notice, "warn")
        self.call_after_refresh(self._start_probe)
        if self._attach_to is not None:
            await self.watch_run(self._attach_to)
        else:
            self._find_live_run()

    def on_unmount(self) -> None:
        self.stop_following()
        if self._probe is not None:
            self._probe.close()
        if self.book is not None:
            self.book.close()

    def _leave_without_terminal(self) -> None:
        """Leave when standard input has hung up (a closed window, a dropped link)."""
        poll = select.poll()
        try:
            poll.register(sys.__stdin__.fileno() if sys.__stdin__ else 0, 0)
            gone = any(event & (select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
        except (OSError, ValueError):
            gone = True
        if gone:
            self.exit()

    # Devices

    def _start_probe(self) -> None:
        from memconsole.devices.probe import Probe

        self._probe = Probe()
        self._probe.start()
        self._await_devices()

    def _await_devices(self) -> None:
        """Check often until the first reading arrives, then once per interval."""
        self._read_devices()
        if self.devices is None:
            self.set_timer(FIRST_CHECK_SECONDS, self._await_devices)
        else:
            self.set_interval(self.interval_seconds, self._read_devices)

    def _read_devices(self) -> None:
        devices = self._probe.latest() if self._probe is not None else None
        if devices is None or devices == self.devices:
            return
        self.set_devices(devices)

    def set_devices(self, devices: Devices) -> None:
        """Pass a new reading to all screens."""
        first, self.devices = self.devices is None, devices
        self.run_view = replace(self.run_view, devices=devices)
        run = self.run_view.snapshot
        if first and run is not None and self.run_view.prediction is None:
            self._predict(run.id, run.plan, devices)
        for screen in self.screen_stack:
            if isinstance(screen, ConsoleScreen):
                screen.devices_changed(devices)

    # Exact numbers

    def open_book(self) -> ExactBook | None:
        """The book of exact numbers, opened on the first call."""
        if self.book is None:
            from memconsole.memory.tracers.exact_book import ExactBook

            self.book = ExactBook(on_news=self._tell_exact_news)
        return self.book

    def _tell_exact_news(self) -> None:
        """Called from the book's thread."""
        self.post_message(ExactNews())

    @on(ExactNews)
    def _exact_news(self) -> None:
        if self.front is not None:
            self.plan_screen.exact_news()

    @work(thread=True, exclusive=True, group="live", exit_on_error=False)
    def _find_live_run(self) -> None:
        from memconsole.runs.read.life.newest import newest_live
        from memconsole.runs.record.directory import RunError

        try:
            run = newest_live()
        except RunError:
            return
        if run is not None and not get_current_worker().is_cancelled:
            self.post_message(LiveRunFound(run.id))

    @on(LiveRunFound)
    async def _offer(self, message: LiveRunFound) -> None:
        """Show a live run, unless the user has begun to plan or asked for a plan."""
        run_id = message.run_id
        if self.run_id or self.front is None:
            return
        if self._plan is None and not self.plan_screen.touched and len(self.screen_stack) == 1:
            await self.watch_run(run_id)
        else:
            self.run_id = run_id
            self.plan_screen.notice(
                f"run {run_id} is live; {self.keys.shown('plan', 'training')} shows it"
            )
            self.plan_screen.refresh_frame()

    def notice(self, words: str, role: str = "accent") -> None:
        """Show a one-row notice on the current screen."""
        if isinstance(self.front, ConsoleScreen):
            self.front.notice(words, role)

    def edit_plan(self, plan: Plan) -> None:
        """Open a plan in the plan screen."""
        self.plan_screen.change(lambda _: plan)
        self.call_later(self.action_show_plan)

    def edit_plan_of(self, run_id: str) -> None:
        """Open a run's plan in the plan screen."""
        from memconsole.runs.record.directory import RunError
        from memconsole.runs.record.run_store import find_run

        try:
            plan = find_run(run_id).read_given_plan()
        except (PlanError, RunError, OSError) as error:
            self.notice(str(error), "bad")
            return
        self.edit_plan(plan)

    def action_theme(self) -> None:
        """Switch to the next theme: dark, light, the terminal's own colours."""
        if self.no_color:
            self.notice("no colours: NO_COLOR is set")
            return
        names = list(self.THEMES)
        at = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(at + 1) % len(names)]
        self.notice(f"colours: {self.theme}{self._remember(theme=self.theme)}")

    def action_mouse(self) -> None:
        """Receive clicks and the wheel, or leave the mouse to the terminal."""
        taken = self.chosen.mouse is False
        self.chosen = msgspec.structs.replace(self.chosen, mouse=taken)
        driver = self._driver
        if isinstance(driver, ClickDriver):
            driver.take_mouse(taken)
        words = "clicks and the wheel act here; shift and drag selects text"
        if not taken:
            words = "the mouse is left to the terminal: drag selects text"
        self.notice(words + self._remember(mouse=taken))

    def _remember(self, **changes: object) -> str:
        """Store a choice for the next console; says if it cannot. A read-only console writes nothing."""
        problem = "" if self.readonly else remember(**changes)
        return f"; not remembered: {problem}" if problem else ""

    def get_driver_class(self) -> type[Driver]:
        return ClickDriver

    def action_background(self) -> None:
        """Give the terminal back to the shell until `fg`."""
        if self._driver is None or not self._driver.can_suspend or not shell_waits():
            self.notice("no shell waits for this console: ctrl+z does nothing")
            return
        to_background()

    def action_leave(self) -> None:
        """Leave; runs go on."""
        self.exit()


if TYPE_CHECKING:
    _implements: type[Console] = ConsoleApp  # checks that the app implements what screens need


def run_console(
    plan: Plan | None = None,
    attach: str | None = None,
    *,
    readonly: bool = False,
    ascii: bool = False,
    slow_link: bool | None = None,
) -> int:
    """Open the console until the user leaves, then print how to return. Returns the exit code."""
    ascii = ascii or not draws_unicode()
    keymap = read_keymap()
    chosen = remembered()
    app = ConsoleApp(
        plan,
        attach,
        readonly=readonly,
        ascii=ascii,
        slow_link=slow_link,
        keymap=keymap,
        chosen=chosen,
    )
    app.run(mouse=chosen.mouse is not False)
    with contextlib.suppress(OSError):
        for line in closing_words(app.run_view, app.ascii_only):
            print(line)
        sys.stdout.flush()
    return app.return_code or 0
