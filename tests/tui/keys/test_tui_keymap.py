"""The keymap file: what it says is what every key does and every screen shows; what cannot be is refused in one line."""

from __future__ import annotations

import string
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from textual.keys import _character_to_key
from textual.widgets import Input

from memconsole.cli.main import cli
from memconsole.plan.plan import Plan
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.draw.lines import plain
from memconsole.tui.keys.keymap import ALL, EDITING, Keymap, dumps, parse, read_keymap
from memconsole.tui.keys.names import character_name, key_name, printed, written
from memconsole.tui.keys.rows import ALL_SCREENS, EXCLUDING, KEYS, RESERVED, for_screen
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.plan.screen import PlanScreen
from memconsole.tui.plan.widgets.toggle_detail import detail_lines
from memconsole.tui.run.header import header_lines
from memconsole.tui.run.output_pane import closed_lines
from memconsole.tui.run.screen import RunScreen
from memconsole.tui.screens.help import HelpScreen
from memconsole.tui.screens.pick import PickScreen
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import Console, screen_text, settle, show_run, snapshot

Make = Callable[..., Console]


def keymap(text: str) -> Keymap:
    table, problems = parse(text)
    return Keymap(Path("keys.toml"), table, problems, there=True)


def good(text: str) -> KeyTable:
    table, problems = parse(text)
    assert problems == ()
    return table


def rows(table: KeyTable) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(screen, row.id): row.names for screen in ALL_SCREENS for row in table.rows(screen)}


BUILT_IN = rows(KeyTable())


# Names


@pytest.mark.parametrize("character", string.punctuation + string.ascii_letters + string.digits)
def test_a_printed_character_is_the_key_that_textual_says_it_is(character: str) -> None:
    name = _character_to_key(character)
    assert character_name(character) == key_name(character) == key_name(name) == name
    assert key_name(printed(name)) == name


@pytest.mark.parametrize(
    ("word", "name"),
    [("esc", "escape"), ("PgUp", "pageup"), ("↑", "up"), ("ctrl+E", "ctrl+e"), ("shift+l", "L"),
     ("shift+ctrl+left", "ctrl+shift+left"), (" enter ", "enter"), ("ctrl++", "ctrl+plus"), ("é", "é"),
     ("foo", None), ("", None), (" ", None), ("ctrl+", None), ("super+x", None), ("shift+?", None),
     ("\x1b", None), ("\u202e", None)],
)  # fmt: skip
def test_a_key_is_known_by_what_people_write(word: str, name: str | None) -> None:
    assert key_name(word) == name


def test_what_is_said_to_edit_text_is_all_that_textual_edits_it_with() -> None:
    bound = {key for b in Input.BINDINGS for key in b.key.split(",")}  # type: ignore[union-attr]
    assert {k for k in bound if not k.startswith("super+")} - {"enter", "ctrl+c"} <= EDITING


# The table


def test_a_row_changes_on_its_screen_and_all_changes_it_everywhere() -> None:
    table = good('[plan]\nlaunch = "L"\n[run]\nhelp = "H"\n[all]\nhelp = "ctrl+g,F"\n')
    changed = {place: keys for place, keys in rows(table).items() if keys != BUILT_IN[place]}
    assert changed == {
        ("plan", "launch"): ("L",), ("run", "help"): ("H",), ("plan", "help"): ("ctrl+g", "F"),
        ("runs", "help"): ("ctrl+g", "F"), ("devices", "help"): ("ctrl+g", "F"),
        ("compare", "help"): ("ctrl+g", "F"), ("plans", "help"): ("ctrl+g", "F"),
    }  # fmt: skip


def test_keys_can_be_swapped_and_excluding_rows_may_share_one() -> None:
    good('[plan]\nlaunch = "f"\nfit = "l"\n[run]\npause = "P"\ncontinue = "P"\n')


BAD = {
    "unknown screen": ('[plam]\nlaunch = "L"', "[plam]: no such screen", 'did you mean "plan"'),
    "no screen": ('launch = "L"', "launch: belongs in the table of a screen", "[plan]"),
    "unknown id": ('[plan]\nlunch = "L"', "[plan] lunch", 'did you mean "launch"'),
    "id of another screen": ('[plan]\nstop = "L"', "[plan] stop", "it belongs to run"),
    "no text": ("[plan]\nlaunch = 3", "[plan] launch", "not text"),
    "a list": ('[plan]\nlaunch = ["L"]', "[plan] launch", "not text"),
    "a table": ('[plan.launch]\nkey = "L"', "[plan] launch", "not text"),
    "no key": ('[plan]\nlaunch = ""', "[plan] launch", "a key is missing"),
    "a comma": ('[plan]\nlaunch = "L,"', "[plan] launch", '"comma"'),
    "unknown key": ('[plan]\nlaunch = "foo"', '"foo" is no key', '"ctrl+e"'),
    "reserved": ('[plan]\nlaunch = "ctrl+b"', "[plan] launch", "does not arrive everywhere"),
    "function key": ('[plan]\nlaunch = "F5"', "f5 does not arrive", "f1 … f24"),
    "taken": ('[plan]\nlaunch = "q"', "q is leave on the plan screen", "free are"),
    "taken by its character": ('[plan]\nlaunch = "?"', "? is help on the plan screen", "free are"),
    "twice": ('[plan]\nlaunch = "L"\nfit = "L"', '[plan] fit = "L": L is launch', "free are"),
    "taken somewhere": ('[all]\nhelp = "s"', "s is", "free are"),
    "text where text is typed": ('[pick]\naccept = "x"', "[pick] accept", "edits text on pick"),
    "text on some screens": ('[all]\ndismiss = "x"', "[all] dismiss", "pick and prompt"),
    "editing where text is typed": ('[prompt]\naccept = "left"', "[prompt] accept", '"enter"'),
    "syntax": ("[plan]\nlaunch = L\n", "not TOML", "line 2"),
    "a row twice": ('[plan]\nlaunch = "L"\nlaunch = "K"', "not TOML", ""),
    "deep": ("[plan]\nlaunch = " + "[" * 5000, "not TOML", ""),
    "control characters": ('[plan]\n"\\u001b]0;x\\u0007" = "\\u009b2J"', "[plan]", "no such row"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_refused_with_one_line_and_changes_nothing(what: str) -> None:
    text, where, allowed = BAD[what]
    table, problems = parse(text)
    kept = '[plan]\nlaunch = "L"' if what == "twice" else ""
    assert rows(table) == rows(good(kept))
    (line,) = problems
    assert where in line
    assert allowed in line
    assert line.isprintable()
    assert len(line) <= 500


@pytest.mark.parametrize(
    "what", [w for w in BAD if "not TOML" not in BAD[w][1] and w != "no screen"]
)
def test_the_good_rows_beside_a_bad_one_apply(what: str) -> None:
    text = '[devices]\nruns = "R"\n' + BAD[what][0]
    table, problems = parse(text)
    assert table.shown("devices", "runs") == "R"
    assert len(problems) == 1


def test_a_refused_row_gives_its_old_key_back_and_whoever_took_it_is_refused_too() -> None:
    table, problems = parse('[plan]\nlaunch = "f"\nfit = "q"\n')
    assert rows(table) == BUILT_IN
    assert [p.split(" =")[0] for p in problems] == ["[plan] fit", "[plan] launch"]


ids = st.sampled_from([row.id for row in KEYS])
some_keys = st.lists(
    st.sampled_from([*"lfqsxLQ?/:", "enter", "escape", "space", "ctrl+e", "ctrl+b", "PgUp", "", "foo"]),
    max_size=3,
).map(",".join)  # fmt: skip
sections = st.sampled_from([*ALL_SCREENS, ALL, "nope"])
files = st.dictionaries(sections, st.dictionaries(ids, some_keys, max_size=6), max_size=4)


@settings(max_examples=25, deadline=None)
@given(files)
@example({"run": {"pause": "x", "continue": "x"}, ALL: {"help": "x"}})
def test_whatever_the_file_says_no_key_does_two_things_and_nothing_reserved_is_used(
    content: dict[str, dict[str, str]],
) -> None:
    text = "\n".join(
        f"[{section}]\n" + "\n".join(f'"{id}" = "{keys}"' for id, keys in given_rows.items())
        for section, given_rows in content.items()
    )
    table, problems = parse(text)
    for screen in ALL_SCREENS:
        owners: dict[str, set[str]] = {}
        for row in table.rows(screen):
            assert row.names
            assert not RESERVED & {*row.names}
            for name in row.names:
                owners.setdefault(name, set()).add(row.when)
            count = sum(
                name in other.names for other in table.rows(screen) for name in row.names[:1]
            )
            assert count == 1 or frozenset(owners[row.names[0]]) <= frozenset().union(*EXCLUDING)
    assert len(problems) <= sum(map(len, content.values())) + 1
    assert rows(good(dumps(table))) == rows(table)


def test_the_printed_file_is_whole_valid_and_changes_nothing() -> None:
    text = dumps(KeyTable())
    document = tomllib.loads(text)
    assert {id for section in document.values() for id in section} == {row.id for row in KEYS}
    assert rows(good(text)) == BUILT_IN
    assert all(row.help in text for screen in ALL_SCREENS for row in for_screen(screen))
    assert written("comma") == "comma"


# The file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "memconsole" / "keys.toml"
    path.parent.mkdir()
    return path


def test_the_file_is_where_other_programs_keep_theirs(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read_keymap().path == place
    monkeypatch.setenv("HOME", str(tmp_path))
    for none in ("", "relative/path"):
        monkeypatch.setenv("XDG_CONFIG_HOME", none)
        assert read_keymap().path == tmp_path / ".config" / "memconsole" / "keys.toml"


def test_without_a_file_the_keys_are_the_built_in_ones(place: Path) -> None:
    found = read_keymap()
    assert (found.there, found.problems, found.notice) == (False, (), "")
    assert rows(found.table) == BUILT_IN


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * 70_000, b"\x00", b"[", None])
def test_a_file_that_cannot_be_read_is_one_line(place: Path, content: bytes | None) -> None:
    if content is None:
        place.mkdir()
    else:
        place.write_bytes(content)
    found = read_keymap()
    assert found.there
    assert len(found.problems) == 1
    assert rows(found.table) == BUILT_IN
    assert found.notice.startswith("keys.toml: ")


def test_the_commands_print_the_keys_in_force_and_doctor_each_problem(place: Path) -> None:
    place.write_text('[plan]\nlaunch = "L"\nlunch = "x"\nfit = "ctrl+b"\n')
    printed_file = CliRunner().invoke(cli, ["keys"])
    assert printed_file.exit_code == 0
    assert good(printed_file.stdout).shown("plan", "launch") == "L"
    assert printed_file.stderr.count("[plan]") == 2
    from memconsole.cli.machine.doctor import _keys

    assert [state for _, state, _ in _keys()] == ["warning", "warning"]
    assert all(str(place) in found and "[plan]" in found for _, _, found in _keys())
    place.write_text('[plan]\nlaunch = "L"\n')
    assert [(state, "1 row" in found) for _, state, found in _keys()] == [("ok", True)]


# The console


async def test_a_remapped_key_acts_and_shows_everywhere_and_the_old_one_does_nothing(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(PlanScreen, "action_launch", lambda self: launched.append("launch"))
    text = (
        '[plan]\nlaunch = "L"\nfit = "F"\n"toggle-train.batch_size" = "ctrl+e"\nhelp = "~"\n'
        'model = "Z"\n'
    )
    app = make_console(keymap=keymap(text), slow_link=False)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        before = app.plan_screen.view.plan
        await pilot.press("l", "f", "b", "question_mark", "h")
        await settle(pilot)
        assert app.screen is app.plan_screen
        assert (launched, app.plan_screen.view.plan) == ([], before)
        await pilot.press("L", "ctrl+e")
        await settle(pilot)
        assert launched == ["launch"]
        assert app.plan_screen.view.plan.train.batch_size != before.train.batch_size
        seen = screen_text(app)
        assert " L launch  F fit " in seen.splitlines()[-1]
        assert "~ help" in seen.splitlines()[-1]
        assert "Z model" in seen.splitlines()[-1]
        assert " Z model " in seen.splitlines()[2]
        assert any("ctrl+e" in line and "batch" in line for line in seen.splitlines()[:-1])
        await pilot.press("colon")
        await settle(pilot)
        assert isinstance(app.screen, PickScreen)
        assert any(c.note.startswith("L · Launch") for c in app.screen._choices)
        await pilot.press("escape", "tilde")
        await settle(pilot)
        assert isinstance(app.screen, HelpScreen)
        lines = screen_text(app).splitlines()
        assert any(line.split()[:2] == ["L", "Launch"] for line in lines)


def test_words_beside_what_a_key_does_name_the_key_in_force() -> None:
    keys = good('[plan]\ntoggle = "N"\n[run]\nresume = "R"\nremedies = "F"\npane = "ctrl+o"\n')
    assert plain(detail_lines(PlanView(Plan(), keys=keys), 60, 2)[0]).startswith(" N →")
    for reason, words in (("crashed", "R resumes it"), ("out_of_memory", "F lists what")):
        verdict = Verdict(reason=reason, evidence="", resumable=True)
        run = snapshot(state="failed", verdict=verdict)
        assert words in plain(header_lines(RunView(run, keys=keys), 120)[1])
    assert "ctrl+o shows" in plain(closed_lines(RunView(snapshot(), keys=keys), 60)[0])


async def test_rows_that_shared_a_key_keep_it_when_one_of_them_is_moved(make_console: Make) -> None:
    app = make_console(keymap=keymap('[run]\npause = "P"\npane = "k"\nglyphs = "o"\n'))
    async with app.run_test(size=(80, 24)) as pilot:
        run = snapshot()
        await show_run(app, pilot, run)
        assert isinstance(app.screen, RunScreen)
        glyphs, pane = app.run_view.glyphs, app.run_view.pane
        await pilot.press("space", "k")
        await settle(pilot)
        assert app.asked == []
        assert app.run_view.pane != pane
        await pilot.press("P", "o")
        await settle(pilot)
        assert app.asked == [(run.id, "pause")]
        assert app.run_view.glyphs != glyphs
        assert "k: " in screen_text(app)
        app.post_message(SnapshotArrived(snapshot(pause_requested=True, phase="paused")))
        await settle(pilot)
        await pilot.press("space")
        await settle(pilot)
        assert app.asked[-1] == (run.id, "continue")


async def test_refused_rows_are_told_on_the_plan_screen(make_console: Make) -> None:
    app = make_console(keymap=keymap('[plan]\nlunch = "L"\nfit = "F"\n'))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        seen = screen_text(app)
        assert 'keys.toml: [plan] lunch = "L": no such row — did you mean "launch"' in seen
        assert "F fit" in seen
