"""The part of the app that goes from one screen to another, and back."""

from __future__ import annotations

import contextlib

from textual import events
from textual._styles_cache import StylesCache
from textual.screen import Screen

from memconsole.tui.app.following import FollowingApp
from memconsole.tui.keys.rows import MAIN
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.plan.screen import PlanScreen
from memconsole.tui.screens.base import ConsoleScreen

MOST_CAME_FROM = 20
"""How many steps back are kept."""


class NavigatingApp(FollowingApp, inherit_bindings=False):
    """Shows at most one main screen above the plan screen, and modal screens over it."""

    def __init__(self, *, slow_link: bool, keys: KeyTable) -> None:
        super().__init__(slow_link=slow_link, keys=keys)
        self.came_from: list[str] = []

    @property
    def front(self) -> Screen[object] | None:
        """The screen on top; None once the console closes."""
        return self.screen_stack[-1] if self.screen_stack else None

    @property
    def plan_screen(self) -> PlanScreen:
        """The screen at the bottom of the stack."""
        screen = self.screen_stack[0]
        assert isinstance(screen, PlanScreen)
        return screen

    async def _show(self, screen: ConsoleScreen | None) -> None:
        """Show only this screen above the plan screen, or none."""
        if self.front is None:
            return
        here = self.screen_stack[min(1, len(self.screen_stack) - 1)]
        left = here.SCREEN if isinstance(here, ConsoleScreen) and here.SCREEN in MAIN else "plan"
        if left != (screen.SCREEN if screen is not None else "plan"):
            self.came_from = [*self.came_from, left][-MOST_CAME_FROM:]
        while len(self.screen_stack) > 1:
            await self.pop_screen()
        # This cache of colours also holds the lines of the last thousand removed widgets.
        with contextlib.suppress(AttributeError):  # another Textual may have no such cache
            StylesCache.get_inner_outer.cache_clear()
        if screen is not None:
            await self.push_screen(screen)

    def on_key(self, event: events.Key) -> None:
        """Called before the key's action."""
        if isinstance(self.screen, ConsoleScreen):
            if self.screen.typed_early(event):
                event.prevent_default()
                return
            self.screen.key_pressed(event.key)

    async def action_go_back(self) -> None:
        """Back to the main screen that was left last; if there is none, to the plan screen."""
        wanted = self.came_from[-1] if self.came_from else "plan"
        rest = self.came_from[:-1]
        await getattr(self, f"action_show_{wanted}")()
        self.came_from = rest
        if isinstance(self.front, ConsoleScreen):
            self.front.refresh_frame()

    async def action_show_plan(self) -> None:
        await self._show(None)

    async def action_show_run(self) -> None:
        from memconsole.tui.run.screen import RunScreen

        if not self.run_id:
            launch, runs = (self.keys.shown("plan", id) for id in ("launch", "runs"))
            self.notice(
                f"no run is being watched; {launch} launches this plan, {runs} lists all runs"
            )
            return
        if not isinstance(self.front, RunScreen):
            if self.run_view.snapshot is None:
                self.ensure_following()
            await self._show(RunScreen())

    async def action_show_runs(self) -> None:
        from memconsole.tui.runs.screen import RunsScreen

        await self._show(RunsScreen())

    async def action_show_devices(self) -> None:
        from memconsole.tui.screens.devices import DevicesScreen

        await self._show(DevicesScreen())

    def action_help(self) -> None:
        from memconsole.tui.screens.help import HelpScreen

        if isinstance(self.screen, ConsoleScreen):
            self.push_screen(HelpScreen(self.screen.SCREEN))

    def action_palette(self) -> None:
        """Pick any action that is available on this screen."""
        from memconsole.tui.screens.pick import Choice, PickScreen

        screen = self.screen
        if not isinstance(screen, ConsoleScreen):
            return
        rows = {
            key.id: key
            for key in screen.offered_keys()
            if key.id != "palette" and not key.action.startswith("move(")
        }
        choices = [
            Choice(key.id, key.label or key.id, f"{key.shown} · {key.help}")
            for key in rows.values()
        ]

        async def picked(value: object) -> None:
            if isinstance(value, str) and value in rows:
                await screen.run_action(rows[value].action)

        self.push_screen(PickScreen("do something", choices), picked)
