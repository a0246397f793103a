"""A screen may be told to draw at any time: before its widgets exist, and while it is removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import memconsole.tui
from memconsole.plan.plan import Plan
from memconsole.tui.app.messages import ActionFailed, LiveRunFound, SnapshotArrived
from memconsole.tui.plan.screen import PlanScreen
from memconsole.tui.run.screen import RunScreen
from memconsole.tui.runs.compare import CompareRunsScreen, RunsRead
from memconsole.tui.runs.runs_list import RunList
from memconsole.tui.runs.screen import RunsListed, RunsScreen
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.screens.command import CommandScreen
from memconsole.tui.screens.confirm import ConfirmAnswer, ConfirmScreen
from memconsole.tui.screens.devices import DevicesScreen
from memconsole.tui.screens.help import HelpScreen
from memconsole.tui.screens.pick import Choice, PickScreen
from memconsole.tui.screens.prompt import PromptScreen
from tests.tui.harness import Console, readings, settle, snapshot

SCREENS: dict[str, Callable[[Console], ConsoleScreen]] = {
    "plan": lambda app: PlanScreen(Plan(), app.keys),
    "run": lambda app: RunScreen(),
    "runs": lambda app: RunsScreen(),
    "compare": lambda app: CompareRunsScreen(()),
    "devices": lambda app: DevicesScreen(),
    "help": lambda app: HelpScreen("plan"),
    "pick": lambda app: PickScreen("pick", [Choice("a", "a", "")]),
    "prompt": lambda app: PromptScreen("prompt", "text", "about", lambda word: None),
    "confirm": lambda app: ConfirmScreen("sure?", [ConfirmAnswer("delete", "do it")]),
    "command": lambda app: CommandScreen(Plan()),
}


def everything_that_draws(app: Console, screen: ConsoleScreen) -> None:
    """What timers, workers, other screens and the terminal cause."""
    screen.on_resize()
    screen.on_screen_resume()
    screen.notice("words")
    screen.refresh_frame()
    screen.devices_changed(readings())
    app.run_view = app.run_view.__class__(snapshot=snapshot(), keys=app.keys)
    screen.run_changed(app.run_view)
    if isinstance(screen, PlanScreen):
        screen.change(lambda plan: plan)
        screen.exact_news()
    if isinstance(screen, RunsScreen):
        screen._listed(RunsListed(RunList(), 0.0))
    if isinstance(screen, CompareRunsScreen):
        screen._read(RunsRead((snapshot(),), "a problem"))


@pytest.mark.parametrize("name", SCREENS)
async def test_a_screen_draws_before_it_is_composed_and_while_it_is_removed(
    name: str, make_console: Callable[..., Console]
) -> None:
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        screen = SCREENS[name](app)
        everything_that_draws(app, screen)
        await app.push_screen(screen)
        await settle(pilot)
        assert app.screen is screen
        # Textual removes the widgets of a screen before the screen itself.
        await screen.remove_children()
        everything_that_draws(app, screen)


async def test_messages_that_arrive_while_the_console_closes_are_dropped(
    make_console: Callable[..., Console],
) -> None:
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
    assert not app.screen_stack
    app._snapshot_arrived(SnapshotArrived(snapshot()))
    app._action_failed(ActionFailed("it failed"))
    app._exact_news()
    await app.action_show_run()
    app.run_id = ""
    await app._offer(LiveRunFound("a-run"))
    assert app.run_id == ""


def test_screens_keep_their_widgets_and_search_for_none() -> None:
    folder = Path(memconsole.tui.__file__).parent
    searching = [
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if "query_one(" in file.read_text(encoding="utf-8")
    ]
    assert searching == []
