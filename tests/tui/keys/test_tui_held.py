"""Screens over another one: each can be left by key, and a key that is held or doubled answers nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual import events

from memconsole.tui.plan.dialogs.launching import LaunchScreen
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.screens.confirm import ConfirmScreen
from memconsole.tui.screens.prompt import PromptScreen
from memconsole.tui.widgets.entry import Entry
from tests.tui.harness import Console, settle, show_run, snapshot

Make = Callable[..., Console]


def kinds(kind: type[ConsoleModal]) -> Iterator[type[ConsoleModal]]:
    for one in kind.__subclasses__():
        yield one
        yield from kinds(one)


def typed(app: Console, *keys: str) -> None:
    """Keys as one burst: all of them wait before the first is handled."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


def test_escape_is_a_key_of_every_screen_over_another_one() -> None:
    found = [kind for kind in kinds(ConsoleModal) if kind.SCREEN]
    assert {LaunchScreen, ConfirmScreen} <= set(found)
    assert [kind for kind in found if "escape" not in kind._merge_bindings().key_to_bindings] == []


async def test_the_launch_dialog_is_left_by_escape(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("l")
        await settle(pilot)
        assert isinstance(app.screen, LaunchScreen)
        await pilot.press("escape")
        await settle(pilot)
        assert app.screen is app.plan_screen


async def test_two_enters_that_arrive_together_close_one_screen(make_console: Make) -> None:
    app = make_console()
    taken: list[object] = []
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for number in range(2):
            app.push_screen(PromptScreen(f"{number}", "name", "", lambda word: None), taken.append)
            await settle(pilot)
        typed(app, "enter", "enter")
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, PromptScreen)
        assert screen.heading == "0"
    assert taken == ["name"]


async def test_a_held_key_neither_stops_a_run_nor_replaces_a_file(
    make_console: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memconsole.tui.screens.base.HELD_SECONDS", 30.0)  # machines may be slow
    (tmp_path / "kept.toml").write_text("mine")
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("w")
        await settle(pilot)
        app.screen.query_one(Entry).value = "kept.toml"
        typed(app, "enter", "enter", "enter")
        await settle(pilot)
        assert isinstance(app.screen, PromptScreen)
        assert (tmp_path / "kept.toml").read_text() == "mine"
        await pilot.press("escape")
        await show_run(app, pilot, snapshot())
        typed(app, "s", "s", "s")
        await settle(pilot)
        assert isinstance(app.screen, ConfirmScreen)
        assert app.asked == []


async def test_editing_keys_act_in_the_order_of_typing(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("w")
        await settle(pilot)
        entry = app.screen.query_one(Entry)
        for before in (("ctrl+u",), ("ctrl+a", "ctrl+k"), ("ctrl+e", "ctrl+w", "ctrl+w")):
            typed(app, *before, *"b.x")
            await settle(pilot)
            assert entry.value.endswith("b.x")
        typed(app, "ctrl+u", *"new")
        await settle(pilot)
        assert entry.value == "new"
