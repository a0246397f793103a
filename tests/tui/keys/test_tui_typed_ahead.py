"""Keys that arrive in one burst, the ends of lists, and what a read-only console leaves alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from textual import events

from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.run_store import create_run
from memconsole.tui.keys.rows import MAIN, for_screen
from memconsole.tui.runs.screen import RunsScreen
from memconsole.tui.screens.command import CommandScreen
from tests.tui.harness import Console, screen_text, settle

Make = Callable[..., Console]


def typed(app: Console, *keys: str) -> None:
    """Keys as one burst: all of them wait before the first is handled."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


async def test_keys_typed_after_the_one_that_leaves_do_nothing(make_console: Make) -> None:
    opening = [key.names[0] for key in for_screen("plan") if key.id != "launch"]
    for following in ("c", "m", "a", "question_mark", "colon"):
        assert following in opening
        app = make_console()
        async with app.run_test(size=(80, 24)) as pilot:
            await settle(pilot)
            typed(app, "q", following)
            await settle(pilot)
        assert app.return_code == 0


@pytest.mark.parametrize(
    ("bursts", "chosen"),
    [
        ([("m", *"gpt2-la", "enter")], {"model.name": "gpt2-large"}),
        ([("m", *"gpt2-lx", "backspace", "a", "enter")], {"model.name": "gpt2-large"}),
        ([("s", *"max_steps", "enter"), (*"77", "enter")], {"train.max_steps": 77}),
    ],
)
async def test_what_is_typed_with_the_key_that_opens_a_picker_counts(
    bursts: list[tuple[str, ...]], chosen: dict[str, object], make_console: Make
) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        before = app.plan_screen.view.plan
        for keys in bursts:
            typed(app, *keys)
            for _ in range(3):
                await settle(pilot)
        assert app.plan_screen.view.plan == replace(before, chosen)


async def test_what_is_typed_with_the_key_of_the_filter_narrows_the_runs(
    make_console: Make,
) -> None:
    for name in ("red", "sorted"):  # s would stop a run
        create_run(Plan(), name)
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)
        typed(app, "slash", *"sorxx", "backspace", "backspace", "enter", "n", "enter")
        for _ in range(3):
            await settle(pilot)
        assert isinstance(app.screen, RunsScreen)
        assert "sorted" in screen_text(app)
        assert "red " not in screen_text(app)
        assert app.focused is None


async def test_a_picker_takes_keys_again_after_the_window_was_too_small(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("m", *"gpt2-la")
        await settle(pilot)
        for size in ((50, 10), (80, 24)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
        await pilot.press("enter")
        await settle(pilot)
        assert app.plan_screen.view.plan.model.name == "gpt2-large"


async def test_end_and_home_select_the_last_and_the_first_run(make_console: Make) -> None:
    runs = [create_run(Plan(), f"number {n}") for n in range(3)]
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, RunsScreen)

        def selected() -> str | None:
            return next((line for line in screen_text(app).splitlines() if "›" in line), None)

        lines = [line for line in screen_text(app).splitlines() if "number " in line]
        assert len(lines) == len(runs)
        names = [line.split("number ")[1][0] for line in lines]
        for key, name in (("end", names[-1]), ("home", names[0]), ("end", names[-1])):
            await pilot.press(key)
            await settle(pilot)
            assert f"number {name}" in (selected() or "")


def test_every_main_screen_has_keys_for_both_ends() -> None:
    for screen in MAIN:
        names = {name for key in for_screen(screen) for name in key.names}
        assert {"home", "end"} <= names


async def test_a_read_only_console_writes_nothing_and_starts_nothing(
    tmp_path: Path, make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(os, "posix_spawn", started)
    monkeypatch.setattr("memconsole.tui.plan.exact.REST_SECONDS", 0.01)
    monkeypatch.setattr(Console, "open_book", started)
    app = make_console(readonly=True)
    async with app.run_test(size=(100, 40)) as pilot:
        await settle(pilot)
        await pilot.press("r")
        await settle(pilot)
        assert "exact numbers: read only, none are traced" in screen_text(app)
        for key in ("w", "l", "1", "f", "B"):
            await pilot.press(key)
            await settle(pilot)
        await pilot.press("c")
        await settle(pilot)
        assert isinstance(app.screen, CommandScreen)
        await pilot.press("y")
        await settle(pilot)
        assert "asked the terminal to copy" in screen_text(app)
        await pilot.press("escape", "a")
        await settle(pilot)
        assert "no runs yet" in screen_text(app)
    assert os.listdir(tmp_path) == []


async def test_the_command_file_is_for_its_owner_alone(tmp_path: Path, make_console: Make) -> None:
    app = make_console()
    before = os.umask(0)
    try:
        async with app.run_test(size=(100, 40)) as pilot:
            await settle(pilot)
            await pilot.press("c", "y")
            await settle(pilot)
    finally:
        os.umask(before)
    file = tmp_path / "state/memconsole/command.sh"
    assert file.read_text().startswith("memconsole train")
    for path in (file, *file.relative_to(tmp_path).parents[:-1]):
        mode = (tmp_path / path).stat().st_mode & 0o777
        assert mode == (0o700 if (tmp_path / path).is_dir() else 0o600), path


async def test_a_current_folder_that_is_gone_is_said(
    tmp_path: Path, make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    app = make_console()
    async with app.run_test(size=(100, 40)) as pilot:
        await settle(pilot)
        gone.rmdir()
        await pilot.press("c")
        await settle(pilot)
        assert "the current folder is gone: change to one that exists" in screen_text(app)
