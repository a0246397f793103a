"""A key of the screen that does nothing now says why, and every key removes the notice before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memconsole.plan.plan import Plan
from memconsole.runs.record.run_store import create_run
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.screens.base import READ_ONLY
from memconsole.tui.screens.confirm import ConfirmScreen
from memconsole.tui.widgets.notice import Notice
from tests.tui.harness import Console, finished, settle, show_run, snapshot

Make = Callable[..., Console]


def said(app: Console) -> str:
    """The notice of the screen in front."""
    return app.screen.query_one(Notice)._words


async def says(app: Console, pilot: Any, key: str) -> str:
    await pilot.press(key)
    await pilot.pause()
    return said(app)


async def test_nothing_to_undo_or_redo_replaces_the_notice_before_it(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.plan_screen.notice("a refusal", "bad")
        assert await says(app, pilot, "u") == "nothing to undo"
        assert await says(app, pilot, "y") == "nothing to redo"
        assert await says(app, pilot, "1") == ""
        assert await says(app, pilot, "u") == ""


async def test_keys_of_the_list_say_what_they_need(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)
        assert await says(app, pilot, "D") == "no run is selected"
        run = create_run(Plan(), "one")
        run.new_attempt()
        await pilot.press("escape", "a")
        await settle(pilot)
        assert await says(app, pilot, "c") == "mark two runs or more with space"
        screen: Any = app.screen
        screen._selected = lambda: snapshot()
        assert await says(app, pilot, "D") == "cannot be deleted: the run is running; stop it first"
        assert await says(app, pilot, "r") == "cannot be resumed: the run is running"


async def test_keys_of_a_run_say_its_state(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await show_run(app, pilot, finished())
        for key in ("s", "space"):
            assert await says(app, pilot, key) == "the run is finished"
        assert await says(app, pilot, "r") == "cannot be resumed: the run is finished"
        assert "nothing is seen to go wrong" in await says(app, pilot, "f")
        assert "sample text first" in await says(app, pilot, "left")
        assert await says(app, pilot, "z") == ""


@pytest.mark.parametrize("key", ["s", "space"])
async def test_a_read_only_console_says_so_on_the_run_screen(make_console: Make, key: str) -> None:
    app = make_console(readonly=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert await says(app, pilot, "l") == READ_ONLY
        await show_run(app, pilot, snapshot())
        assert await says(app, pilot, key) == READ_ONLY
        assert app.asked == []


async def test_a_notice_about_an_earlier_state_of_the_run_goes(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await show_run(app, pilot, snapshot())
        assert "asked the run to pause" in await says(app, pilot, "space")
        app.post_message(SnapshotArrived(snapshot(350, pause_requested=True)))
        await settle(pilot)
        assert "asked the run to pause" in said(app)
        app.post_message(SnapshotArrived(snapshot(360)))
        await settle(pilot)
        assert said(app) == ""
        await pilot.press("space")
        app.post_message(SnapshotArrived(snapshot(360, phase="paused", pause_requested=True)))
        await settle(pilot)
        assert said(app) == ""


async def test_a_key_that_opens_another_screen_removes_the_notice(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await show_run(app, pilot, snapshot())
        run_screen = app.screen
        assert await says(app, pilot, "space") != ""
        await pilot.press("s")
        await settle(pilot)
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("escape")
        await settle(pilot)
        assert app.screen is run_screen
        assert said(app) == ""
