"""One key table: bindings, footer, help and actions agree, and nothing reserved is used."""

from __future__ import annotations

from importlib import import_module

import pytest

from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.tui.app.console import ConsoleApp
from memconsole.tui.draw.lines import plain, width_of
from memconsole.tui.keys.groups import _GROUP_OF, all_groups
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
    "launch": "plan.dialogs.launching.LaunchScreen",
    "confirm": "screens.confirm.ConfirmScreen",
    "help": "screens.help.HelpScreen",
    "command": "screens.command.CommandScreen",
    "compare": "runs.compare.CompareRunsScreen",
    "plans": "plan.dialogs.side_by_side.ComparePlansScreen",
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


@pytest.mark.parametrize("current", [*MAIN, *MODAL])
def test_the_help_holds_every_row_once_and_this_screens_rows_first(current: str) -> None:
    screens = all_groups(KeyTable(), current)
    assert screens[0][0] == current
    rows = [key.id for _, groups in screens for group in groups for key in group.rows]
    assert sorted(rows) == sorted(key.id for key in KEYS)
    assert {key.id for group in screens[0][1] for key in group.rows} == {
        key.id for key in for_screen(current)
    }


@pytest.mark.parametrize("width", [60, 76, 116, 156])
def test_the_help_says_every_key_whole_and_in_columns_where_they_fit(width: int) -> None:
    lines = help_lines(KeyTable(), "run", width)
    assert all(width_of(line) <= width for line in lines)
    assert not any("…" in plain(line) for line in lines)
    words = " ".join(span.text for line in lines for span in line).split()
    for key in KEYS:
        named = key.label if key.id.startswith("toggle-") else key.help
        assert not set(named.split()) - set(words), key.id
    side_by_side = plain(lines[0]).count("─ ") + 1
    assert side_by_side == {60: 1, 76: 1, 116: 2, 156: 3}[width]


def test_groups_of_the_help_name_rows_that_exist() -> None:
    ids = {key.id for key in KEYS}
    assert not set(_GROUP_OF) - ids


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("screen", MAIN)
def test_the_footer_fits_and_always_shows_help_and_quit(screen: str, width: int) -> None:
    line = key_line(for_screen(screen), width)
    assert width_of(line) <= width + 1
    assert "help" in plain(line)
    assert "quit" in plain(line)


def test_binding_ids_let_a_keymap_change_keys() -> None:
    assert all(b.id for screen in CLASSES for b in bindings(screen))  # type: ignore[union-attr]
