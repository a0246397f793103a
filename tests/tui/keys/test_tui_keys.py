"""One key table: bindings, footer, help and actions agree, and nothing reserved is used."""

from __future__ import annotations

from importlib import import_module

import pytest

from memconsole.plan.optimizations import OPTIMIZATIONS
from memconsole.tui.app.console import ConsoleApp
from memconsole.tui.draw.ink import plain, width_of
from memconsole.tui.keys.rows import (
    EXCLUDING,
    KEYS,
    MAIN,
    MODAL,
    RESERVED,
    bindings,
    for_screen,
)
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.screens.help import help_lines
from memconsole.tui.widgets.key_bar import key_line

CLASSES = {
    "plan": "plan.screen.PlanScreen",
    "run": "run.screen.RunScreen",
    "runs": "runs.screen.RunsScreen",
    "devices": "screens.devices.DevicesScreen",
    "pick": "screens.pick.PickScreen",
    "prompt": "screens.prompt.PromptScreen",
    "confirm": "screens.confirm.ConfirmScreen",
    "help": "screens.help.HelpScreen",
    "command": "screens.command.CommandScreen",
    "compare": "runs.compare.CompareRunsScreen",
    "plans": "plan.side_by_side.ComparePlansScreen",
}


def screen_class(name: str) -> type:
    module, _, screen = CLASSES[name].rpartition(".")
    found = getattr(import_module(f"memconsole.tui.{module}"), screen)
    assert isinstance(found, type)
    return found


def test_every_screen_of_the_table_exists_and_binds_exactly_its_rows() -> None:
    assert set(CLASSES) == {*MAIN, *MODAL} == {s for key in KEYS for s in key.screens}
    for name in CLASSES:
        bound = {b.id for b in screen_class(name).BINDINGS}  # type: ignore[attr-defined]
        assert bound == {f"{name}.{key.id}" for key in for_screen(name)}


@pytest.mark.parametrize("screen", [*MAIN, *MODAL])
def test_no_key_does_two_things_on_one_screen(screen: str) -> None:
    rows: dict[str, list[str]] = {}
    for row in for_screen(screen):
        for key in row.keys.split(","):
            rows.setdefault(key, []).append(row.when)
    # A key may have two rows only if their conditions exclude each other.
    twice = [when for when in rows.values() if len(when) > 1]
    assert all(len(when) == 2 and frozenset(when) in EXCLUDING for when in twice)


def test_no_reserved_key_is_used() -> None:
    used = {key for row in KEYS for key in row.keys.split(",")}
    assert not used & RESERVED


@pytest.mark.parametrize("screen", [*MAIN, *MODAL])
def test_every_action_exists_where_its_key_is_bound(screen: str) -> None:
    for key in for_screen(screen):
        name = key.action.partition("(")[0]
        owner: type = ConsoleApp if name.startswith("app.") else screen_class(screen)
        assert hasattr(owner, f"action_{name.removeprefix('app.')}"), key.id


def test_every_optimization_has_its_own_key() -> None:
    keys = [KeyTable().toggle_key(row.key) for row in OPTIMIZATIONS]
    assert all(keys)
    assert len(set(keys)) == len(keys)


def test_every_screen_can_be_left_and_main_screens_by_both_keys() -> None:
    for screen in (*MAIN, *MODAL):
        keys = {k for row in for_screen(screen) for k in row.keys.split(",")}
        assert "ctrl+q" in keys
        assert "ctrl+l" in keys
        assert ("q" in keys) == (screen in MAIN)
        assert ("escape" in keys) or screen in ("plan", "run")


def test_ids_are_unique_and_every_row_has_help() -> None:
    ids = [key.id for key in KEYS]
    assert len(set(ids)) == len(ids)
    assert all(key.help.endswith(".") and key.shown for key in KEYS)


def test_the_help_screen_holds_every_row_once() -> None:
    for current in (*MAIN, *MODAL):
        text = "\n".join(plain(line) for line in help_lines(KeyTable(), current, 200))
        for key in KEYS:
            assert text.count(f"{key.help}") >= 1, key.id


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("screen", MAIN)
def test_the_footer_fits_and_always_shows_help_and_quit(screen: str, width: int) -> None:
    line = key_line(for_screen(screen), width)
    assert width_of(line) <= width + 1
    assert "help" in plain(line)
    assert "quit" in plain(line)


def test_binding_ids_let_a_keymap_change_keys() -> None:
    assert all(b.id for screen in CLASSES for b in bindings(screen))  # type: ignore[union-attr]
