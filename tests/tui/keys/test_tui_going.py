"""Going back, what the console remembers, ends of lists, answers with keys of their own, and completed paths."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from memconsole.path_completion import completed, completions
from memconsole.plan.plan import Plan
from memconsole.runs.record.run_store import create_run, runs_root
from memconsole.tui.app import remembered as kept
from memconsole.tui.app.remembered import Remembered, remember, remembered
from memconsole.tui.draw.themes import DARK, LIGHT
from memconsole.tui.keys.rows import KEYS
from memconsole.tui.screens.pick import Choice, PickScreen
from memconsole.tui.screens.prompt import PromptScreen
from tests.tui.harness import Console, screen_lines, screen_text, settle

Make = Callable[..., Console]


def screen(app: Console) -> str:
    return screen_text(app).split()[1]


async def test_escape_goes_back_the_way_one_came(make_console: Make) -> None:
    create_run(Plan(), "one")
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        assert "esc back" not in screen_text(app)
        for key in ("a", "enter", "g", "p"):
            await pilot.press(key)
            await settle(pilot)
        assert screen(app) == "plan"
        found = []
        for _ in range(4):
            assert "esc back" in screen_text(app)
            await pilot.press("escape")
            await settle(pilot)
            found.append(screen(app))
        assert found == ["devices", "run", "all", "plan"]
        assert "esc back" not in screen_text(app)


async def test_the_lines_of_a_screen_that_was_left_are_freed(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)
        screen_text(app)
        drawn = [weakref.ref(widget._styles_cache) for widget in app.screen.query("*")]
        assert any(one() for one in drawn)
        for key in "papapap":  # tasks that began on a screen hold it for a while
            await pilot.press(key)
            await settle(pilot)
        gc.collect()
        assert [one() for one in drawn if one() is not None] == []


async def test_colours_are_remembered_and_a_read_only_console_writes_nothing(
    make_console: Make,
) -> None:
    app = make_console(readonly=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("T")
        await settle(pilot)
        assert app.theme == LIGHT.name
    assert remembered() == Remembered()
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("T", "ctrl+t")
        await settle(pilot)
        assert "left to the terminal" in screen_text(app)
    assert remembered() == Remembered(theme=LIGHT.name, mouse=False)
    assert make_console(chosen=remembered()).theme == LIGHT.name
    assert make_console(chosen=Remembered(theme="no such theme")).theme == DARK.name


def test_a_damaged_memory_is_none_and_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remember(theme=DARK.name) == ""
    path = runs_root().parent / kept.NAME
    path.write_bytes(b'{"theme": 3}')
    assert remembered() == Remembered()

    def full(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(kept.files, "write_atomic", full)
    assert remember(mouse=True) == "no room"


async def test_home_and_end_move_a_picker_until_something_is_typed(make_console: Make) -> None:
    choices = [Choice(str(n), f"choice {n:02d}") for n in range(40)]
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(PickScreen("take one", choices))
        await settle(pilot)
        for key, row in (("end", "choice 39"), ("home", "choice 00")):
            await pilot.press(key)
            await settle(pilot)
            assert any("›" in line and row in line for line in screen_lines(app)), key
        await pilot.press("c", "end")
        await settle(pilot)
        assert any("›" in line and "choice 00" in line for line in screen_lines(app))


def test_stop_kill_delete_and_launch_have_keys_of_their_own() -> None:
    answers = {key.id: key.keys for key in KEYS if key.screens == ("confirm",)}
    assert len(set(answers.values())) == len(answers) == 4
    asking = {key.id: key.keys for key in KEYS if key.id in ("stop", "delete", "launch")}
    assert len(set(asking.values())) == 3
    assert answers["delete-now"] != asking["delete"], "a key that repeats must not delete"


def test_paths_are_completed_as_far_as_they_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "plans/tonight.toml",
        "plans/tomorrow.toml",
        "plans/notes.txt",
        ".hidden/x",
        "plane",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completions("") == ["plans/", "plane"]
    assert completed("pl") == "plan"
    assert completed("plans") == "plans/"
    assert completions("plans/to") == ["plans/tomorrow.toml", "plans/tonight.toml"]
    assert completed("plans/", (".toml",)) == "plans/to"
    assert completed("~/plans/ton") == "~/plans/tonight.toml"
    assert completions(".h") == [".hidden/"]
    for bad in ("nowhere/x", "\0", "~nobody-here/x", "plane/x"):
        assert completions(bad) == []
        assert completed(bad) == bad


async def test_tab_completes_the_path_of_a_plan_file(
    make_console: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tonight.toml").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    app = make_console()
    taken: list[object] = []
    async with app.run_test(size=(80, 24)) as pilot:
        prompt = PromptScreen("open plan", "", "a TOML file", lambda _: None, (".toml",))
        await app.push_screen(prompt, taken.append)
        await settle(pilot)
        text = screen_text(app)
        assert "tonight.toml" in text
        assert "notes.txt" not in text
        assert "tab complete the path" in text
        await pilot.press("tab", "enter")
        await settle(pilot)
    assert taken == ["tonight.toml"]


async def test_a_picker_that_takes_paths_offers_what_is_there(
    make_console: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("x")
    monkeypatch.chdir(tmp_path)
    app = make_console()
    taken: list[object] = []
    async with app.run_test(size=(80, 24)) as pilot:
        picker = PickScreen("data", [Choice("stories", "stories")], free_text="path", suffixes=())
        await app.push_screen(picker, taken.append)
        await settle(pilot)
        await pilot.press(".", "/", "t", "tab")
        await settle(pilot)
        assert "./texts/a.jsonl" in screen_text(app)
        await pilot.press("down", "enter")
        await settle(pilot)
    assert taken == ["./texts/a.jsonl"]


async def test_the_model_picker_offers_folders_alone(
    make_console: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-text.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("m", ".", "/", "m", "y")
        await settle(pilot)
        assert "./my-model/" in screen_text(app)
        assert "my-text" not in screen_text(app)


async def test_a_setting_that_names_a_file_completes_it(
    make_console: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held-out.jsonl").write_text("x")
    monkeypatch.chdir(tmp_path)
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("s", *"data.validation", "enter")
        await settle(pilot)
        await pilot.press("ctrl+u", *"he", "tab")
        await settle(pilot)
        assert "held-out.jsonl" in screen_text(app)
