"""Sends the terminal only the cells that have changed, with the shortest style codes.

Textual sends the rows of a dirty widget from its left edge, each piece of text with its whole
style. `TerminalDiff` remembers what the terminal shows and sends the difference, as curses programs do. A
style changes by sending only the codes that differ. Positions are absolute, and are sent again
after every character whose width terminals disagree about. Control characters never pass, whatever
a widget was told to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from rich.cells import cell_len
from rich.color import Color, ColorSystem
from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.strip import Strip

SHORT_GAP = 6
"""A gap of at most this many unchanged cells is sent again; a cursor jump costs about as much."""
_VISIBLE_ON_BLANKS = ("underline", "reverse", "strike", "underline2", "overline")
_ATTRIBUTES = (
    ("bold", "1"), ("dim", "2"), ("italic", "3"), ("underline", "4"), ("blink", "5"), ("reverse", "7"),
    ("conceal", "8"), ("strike", "9"), ("underline2", "21"), ("overline", "53"),
)  # fmt: skip
_LEVELS = (0, 95, 135, 175, 215, 255)
_XTERM = {
    ColorTriplet(r, g, b): 16 + n for n, (r, g, b) in enumerate(product(_LEVELS, repeat=3))
} | {ColorTriplet(grey, grey, grey): 232 + n for n, grey in enumerate(range(8, 248, 10))}
"""The colours of xterm's palette that users cannot redefine."""


class CellStyle(NamedTuple):
    """SGR codes of a cell. None: makes no difference because the cell is blank."""

    attributes: str | None
    foreground: str | None
    background: str


class Cell(NamedTuple):
    """The text of one cell ("" for the second half of a wide character) and its style."""

    text: str
    style: CellStyle


Row = list[Cell | None]
_PLAIN = CellStyle("", "39", "49")
_WEIGHTS = ("", "1", "2")
"""Attributes that the one code 22 turns off."""


@lru_cache(maxsize=4096)
def style_of(style: Style | None, system: ColorSystem | None, blank: bool) -> CellStyle:
    """The codes of a style on a terminal with `system` colours (None: without colours); `blank` for text of spaces
    only."""
    if style is None:
        return CellStyle(None, None, "49") if blank else _PLAIN
    background = _codes(style.bgcolor, system, foreground=False)
    if blank and not any(getattr(style, name) for name in _VISIBLE_ON_BLANKS):
        return CellStyle(None, None, background)
    attributes = ";".join(code for name, code in _ATTRIBUTES if getattr(style, name))
    return CellStyle(attributes, _codes(style.color, system, foreground=True), background)


def _codes(color: Color | None, system: ColorSystem | None, *, foreground: bool) -> str:
    """The codes of a colour.

    A true colour that is in xterm's palette is sent by its number, which is half as long.
    """
    if color is None or system is None:
        return "39" if foreground else "49"
    number = _XTERM.get(color.triplet) if color.triplet else None
    if number is not None and system is ColorSystem.TRUECOLOR:
        return f"{38 if foreground else 48};5;{number}"
    return ";".join(color.downgrade(system).get_ansi_codes(foreground))


def cells_of(strip: Iterable[Segment], system: ColorSystem | None) -> Iterator[Cell]:
    """One item per terminal cell."""
    for text, style, control in strip:
        if control:
            continue
        cell_style, blank_style = style_of(style, system, False), style_of(style, system, True)
        if text.isascii() and text.isprintable():
            for character in text:
                yield Cell(character, blank_style if character == " " else cell_style)
            continue
        cell: Cell | None = None
        for character in text:
            width = cell_len(character)
            shown = character.isprintable() or character == "\u00a0"
            if width == 0:
                # A zero-width character joins the one before it; a control character is dropped.
                if shown and cell is not None:
                    cell = Cell(cell.text + character, cell.style)
                continue
            yield from _with_halves(cell)
            cell = None
            if not shown:
                yield from [Cell("\ufffd", cell_style)] * width
                continue
            cell = Cell(character, blank_style if character == " " else cell_style)
        yield from _with_halves(cell)


def _with_halves(cell: Cell | None) -> Iterator[Cell]:
    """A cell, then the rest of a wide character as cells without text."""
    if cell is not None:
        yield cell
        for _ in range(cell_len(cell.text[0]) - 1):
            yield Cell("", cell.style)


class TerminalDiff:
    """Remembers the screen as the terminal shows it, and makes the text that updates it."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._columns = 0

    def forget(self) -> None:
        """Forget what the terminal shows, so that the next frame is sent whole."""
        self._rows, self._columns = [], 0

    def render(
        self,
        update: ChopsUpdate | LayoutUpdate,
        columns: int,
        rows: int,
        system: ColorSystem | None,
    ) -> str:
        """The text that updates a terminal of this size; empty if nothing changed. Without a `system`, it has no
        colours."""
        if columns != self._columns or rows != len(self._rows):
            self._columns = columns
            self._rows = [[None] * columns for _ in range(rows)]
        sent: list[str] = []
        writer = _Writer(sent)
        for y, x, strip in _pieces(update):
            if 0 <= y < rows and x < columns:
                self._send(y, x, list(cells_of(strip, system))[: columns - x], writer)
        writer.end()
        return "".join(sent)

    def _send(self, y: int, x: int, cells: list[Cell], writer: _Writer) -> None:
        """Draw the cells that differ, in runs."""
        row = self._rows[y]
        shown = row[x : x + len(cells)]
        start = 0
        for first, last in _runs(shown, cells):
            first = max(first, start)
            writer.move(x + first, y)
            for cell in cells[first:last]:
                writer.draw(cell)
            start = last
        row[x : x + len(cells)] = cells


def _pieces(update: ChopsUpdate | LayoutUpdate) -> Iterator[tuple[int, int, Strip]]:
    """(row, column, text) of everything an update would paint."""
    if isinstance(update, LayoutUpdate):
        for y, strips in enumerate(update.strips, update.region.y):
            x = update.region.x
            for strip in strips:
                yield y, x, strip
                x += strip.cell_length
        return
    for y, left, right in update.spans:
        for end, (x, piece) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
            if piece is not None and x < right and end > left:
                begin = max(x, left)
                yield y, begin, piece.crop(begin - x, min(end, right) - x)


def _runs(shown: list[Cell | None], wanted: list[Cell]) -> list[tuple[int, int]]:
    """Half-open runs of cells to draw.

    They cover the cells that differ, short gaps between them, and whole wide characters.
    """
    runs: list[tuple[int, int]] = []
    for n, cell in enumerate(wanted):
        if shown[n] == cell:
            continue
        if runs and n - runs[-1][1] <= SHORT_GAP:
            runs[-1] = (runs[-1][0], n + 1)
        else:
            runs.append((n, n + 1))
    return [_whole(first, last, shown, wanted) for first, last in runs]


def _whole(first: int, last: int, shown: list[Cell | None], wanted: list[Cell]) -> tuple[int, int]:
    """The run, extended so that it splits no wide character, neither an old nor a new one."""
    while first > 0 and (wanted[first].text == "" or _half(shown[first])):
        first -= 1
    while last < len(wanted) and (wanted[last].text == "" or _half(shown[last])):
        last += 1
    return first, last


def _half(cell: Cell | None) -> bool:
    return cell is not None and cell.text == ""


class _Writer:
    """Writes cells in order, and moves or changes style only when needed."""

    def __init__(self, sent: list[str]) -> None:
        self._sent = sent
        self._cursor: tuple[int, int] | None = None
        """Where the terminal would draw the next character; None if terminals may disagree."""
        self._next = (0, 0)
        """Where the next cell is to be drawn."""
        self._style: CellStyle | None = None

    def move(self, x: int, y: int) -> None:
        self._next = (x, y)

    def draw(self, cell: Cell) -> None:
        x, y = self._next
        self._next = (x + 1, y)
        if not cell.text:
            return
        if self._cursor != (x, y):
            self._sent.append(f"\x1b[{y + 1};{x + 1}H")
        self._restyle(cell.style)
        self._sent.append(cell.text)
        self._cursor = (x + 1, y) if cell.text.isascii() or _narrow(cell.text) else None

    def _restyle(self, style: CellStyle) -> None:
        now = self._style
        if now is None:
            # The missing codes of a blank cell may be anything; take the plain ones.
            now = _PLAIN
        attributes = now.attributes if style.attributes is None else style.attributes
        if style.attributes is None and _marks_blanks(attributes or ""):
            attributes = ""
        foreground = now.foreground if style.foreground is None else style.foreground
        wanted = CellStyle(attributes, foreground, style.background)
        if wanted == now:
            self._style = now
            return
        pairs = ((wanted.foreground, now.foreground), (wanted.background, now.background))
        if wanted.attributes == now.attributes:
            codes = [code for code, before in pairs if code != before]
        elif wanted.attributes in _WEIGHTS and now.attributes in _WEIGHTS:
            codes = ["22" if now.attributes else "", wanted.attributes or ""]
            codes += [code for code, before in pairs if code != before]
        else:
            colours = ((wanted.foreground, "39"), (wanted.background, "49"))
            codes = ["0", wanted.attributes or "", *(c for c, plain in colours if c != plain)]
        self._sent.append(f"\x1b[{';'.join(code for code in codes if code)}m")
        self._style = wanted

    def end(self) -> None:
        """Reset the style, because every update assumes a plain style."""
        if self._style not in (None, _PLAIN):
            self._sent.append("\x1b[0m")


@lru_cache(maxsize=4096)
def _narrow(text: str) -> bool:
    """Whether every terminal draws this in one cell, as with Latin, box drawing and braille."""
    return (
        len(text) == 1 and cell_len(text) == 1 and (text < "\u2000" or "\u2010" <= text < "\u2e80")
    )


@lru_cache(maxsize=256)
def _marks_blanks(attributes: str) -> bool:
    codes = dict(_ATTRIBUTES)
    return any(codes[name] in attributes.split(";") for name in _VISIBLE_ON_BLANKS)


class Difference(CompositorUpdate):
    """An update that is already text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def render_segments(self, console: Console) -> str:
        return self._text
