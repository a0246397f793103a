"""The difference that is sent leaves a terminal exactly as Textual's own bytes would."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pyte
import pytest
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.geometry import Region
from textual.strip import Strip

from memconsole.tui.app.remembered import Remembered
from memconsole.tui.app.terminal_diff import TerminalDiff, style_of
from tests.tui.harness import Console as ConsoleUnderTest
from tests.tui.harness import settle

COLUMNS, ROWS = 30, 8
TEXTS = ("memory", "~4.02 MiB", " ", "   ", "█▌┃", "⣿⡇", "日本", "a日", "é", "x", "−12", "e\u0301z")
STYLES = (
    None,
    Style(),
    Style(color="#5fafff", bgcolor="#121212"),
    Style(color="#ffaf5f", bgcolor="#121212", bold=True),
    Style(color="#d0d0d0", bgcolor="#223446"),
    Style(color="red"),
    Style(reverse=True),
    Style(bgcolor="#121212", underline=True),
    Style(color="#87d787", bold=True, reverse=True),
)


def strip(chance: random.Random, width: int) -> Strip:
    segments = []
    while sum(Segment(text).cell_length for text, *_ in segments) < width:
        segments.append(Segment(chance.choice(TEXTS), chance.choice(STYLES)))
    return Strip(segments).adjust_cell_length(width, Style(bgcolor="#121212")).crop(0, width)


def whole(chance: random.Random) -> LayoutUpdate:
    region = Region(0, 0, COLUMNS, ROWS)
    return LayoutUpdate([[strip(chance, COLUMNS)] for _ in range(ROWS)], region)


def partial(chance: random.Random) -> ChopsUpdate:
    """Some rows, in two chops each, of which whole chops change."""
    middle = COLUMNS // 2
    chops: list[dict[int, Strip | None]] = []
    ends = []
    for _ in range(ROWS):
        chops.append({0: strip(chance, middle), middle: strip(chance, COLUMNS - middle)})
        ends.append([middle, COLUMNS])
    spans = []
    for y in sorted(chance.sample(range(ROWS), 3)):
        spans.append((y, *chance.choice([(0, middle), (middle, COLUMNS), (0, COLUMNS)])))
    return ChopsUpdate(chops, spans, ends)


class Seen:
    """A terminal that is shown bytes."""

    def __init__(self) -> None:
        # Larger than what is drawn: at its edges pyte wraps wide characters early.
        self.screen = pyte.Screen(COLUMNS + 2, ROWS + 1)
        self._stream = pyte.Stream(self.screen)

    def show(self, text: str) -> list[list[tuple[Any, ...]]]:
        self._stream.feed(text)
        rows = []
        for y in range(ROWS):
            row = []
            for x in range(COLUMNS):
                cell = self.screen.buffer[y][x]
                seen = (cell.data, cell.fg, cell.bg, cell.bold, cell.underscore, cell.reverse)
                if cell.data == " " and not cell.underscore and not cell.reverse:
                    seen = (" ", "", cell.bg, False, False, False)
                row.append(seen)
            rows.append(row)
        return rows


@pytest.mark.parametrize("seed", range(40))
def test_the_terminal_ends_up_as_textual_would_leave_it(seed: int) -> None:
    chance = random.Random(seed)
    console = Console(color_system="truecolor", force_terminal=True)
    theirs, ours, terminal = Seen(), Seen(), TerminalDiff()
    for n in range(12):
        update = whole(chance) if n == 0 or chance.random() < 0.2 else partial(chance)
        if chance.random() < 0.1:
            terminal.forget()
        expected = theirs.show(update.render_segments(console))
        sent = terminal.render(update, COLUMNS, ROWS, ColorSystem.TRUECOLOR)
        assert ours.show(sent) == expected
        assert "\n" not in sent


def test_the_same_frame_again_sends_nothing_and_one_cell_only_itself() -> None:
    terminal = TerminalDiff()
    style = Style(color="#d0d0d0", bgcolor="#121212")

    def frame(text: str) -> LayoutUpdate:
        strips = [[Strip([Segment(text.ljust(COLUMNS), style)])] for _ in range(ROWS)]
        return LayoutUpdate(strips, Region(0, 0, COLUMNS, ROWS))

    first = terminal.render(frame("step 100"), COLUMNS, ROWS, ColorSystem.TRUECOLOR)
    assert len(first) < COLUMNS * ROWS + 12 * ROWS + 60, "the style is sent once"
    assert terminal.render(frame("step 100"), COLUMNS, ROWS, ColorSystem.TRUECOLOR) == ""
    changed = terminal.render(frame("step 101"), COLUMNS, ROWS, ColorSystem.TRUECOLOR)
    assert changed.count("1") >= ROWS
    assert "step" not in changed
    terminal.forget()
    assert (
        terminal.render(frame("step 101"), COLUMNS, ROWS, ColorSystem.TRUECOLOR).count("step")
        == ROWS
    )


def test_another_size_is_sent_whole() -> None:
    terminal, chance = TerminalDiff(), random.Random(1)
    update = whole(chance)
    assert terminal.render(update, COLUMNS, ROWS, ColorSystem.TRUECOLOR)
    assert terminal.render(update, COLUMNS + 1, ROWS, ColorSystem.TRUECOLOR)


def test_a_position_follows_every_character_of_doubtful_width() -> None:
    terminal = TerminalDiff()
    text = Strip([Segment("👩\u200d👩x日y")])
    update = LayoutUpdate([[text]], Region(0, 0, COLUMNS, 1))
    sent = terminal.render(update, COLUMNS, 1, ColorSystem.TRUECOLOR)
    assert sent[sent.index("x") - 1] == "H"
    assert sent[sent.index("y") - 1] == "H"


@pytest.mark.parametrize("system", [ColorSystem.STANDARD, ColorSystem.EIGHT_BIT])
def test_fewer_colours_are_sent_in_their_own_codes(system: ColorSystem) -> None:
    strips = [[Strip([Segment("x", Style(color="#5fafff", bgcolor="#121212"))])]]
    sent = TerminalDiff().render(LayoutUpdate(strips, Region(0, 0, 1, 1)), 1, 1, system)
    assert "38;2" not in sent
    assert "48;2" not in sent


async def test_no_color_sends_attributes_and_no_colours(
    make_console: Callable[..., ConsoleUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = make_console(chosen=Remembered(theme="memconsole-light"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for keys in ("", "T", "m"):
            await pilot.press(*keys)
            await settle(pilot)
            strips = app.screen._compositor.render_strips()
            frame = LayoutUpdate([[strip] for strip in strips], Region(0, 0, 80, 24))
            sent = TerminalDiff().render(frame, 80, 24, app.colours)
            codes = {
                code for found in re.findall(r"\x1b\[([\d;]*)m", sent) for code in found.split(";")
            }
            assert {"1", "2", "7"} <= codes <= {"0", "1", "2", "7", "22"}


def test_an_empty_no_color_changes_nothing(
    make_console: Callable[..., ConsoleUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    app = make_console()
    assert not app.no_color
    assert (app.theme, app.colours is None) == ("memconsole-dark", False)


def test_a_colour_of_xterms_palette_goes_by_its_number_and_only_such_a_one() -> None:
    for number in range(16, 256):
        colour = Color.from_ansi(number).get_truecolor()
        style = Style(color=Color.from_triplet(colour), bgcolor=Color.from_triplet(colour))
        look = style_of(style, ColorSystem.TRUECOLOR, False)
        assert (look.foreground, look.background) == (f"38;5;{number}", f"48;5;{number}")
    other = style_of(Style(color=Color.parse("#8f8f8e")), ColorSystem.TRUECOLOR, False)
    assert other.foreground == "38;2;143;143;142"
    sixteen = style_of(Style(color=Color.parse("#5fafff")), ColorSystem.STANDARD, False)
    assert ";" not in str(sixteen.foreground)
