"""Lines of styled text as plain values, which widgets draw and tests read.

A line is a list of `Span`s, each a text and its *role* ("good", "dim", "train" …). Roles become
colours in one place (`Painted`), so a renderer is a function of values. Text reaches the terminal
only through `cleaned`, which lets no control character pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size

from memconsole.sanitize import clean_line

ROLES = (
    "dim", "strong", "good", "bad", "warn", "accent", "key", "title", "train", "validation",
    "baseline", "tick", "part-a", "part-b", "part-c", "part-d",
)  # fmt: skip
"""Every role besides "" (plain). A role followed by ``@cursor`` is on the selected row."""


class Span(NamedTuple):
    """A text and its role."""

    text: str
    role: str = ""


Line = list[Span]

_ASCII = str.maketrans(
    {
        "▕": "|", "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": "-", "▎": "-", "▏": "|",
        "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%", "░": ".", "▒": ":", "▓": "%", "·": "-", "…": ".", "→": ">", "←": "<",
        "−": "-", "–": "-", "—": "-", "×": "x", "±": "+", "›": ">", "●": "*", "○": "o",
        "◆": "o", "■": "#", "‖": "=", "✓": "v", "✗": "x", "▲": "!", "─": "-", "│": "|", "┃": "|",
        "┄": ".", "┤": "|", "┴": "+", "└": "+", "≥": ">", "≤": "<", "↑": "^", "↓": "v",
        "°": " ", "“": '"', "”": '"', "’": "'", "µ": "u",
    }
)  # fmt: skip


def cleaned(text: str, ascii_only: bool = False) -> str:
    """`text` as one line without control, escape, bidi or other unprintable characters."""
    if not text.isprintable():
        text = clean_line(text).expandtabs(4)
        if not text.isprintable():
            text = "".join(c if c.isprintable() or c == "\u00a0" else "\ufffd" for c in text)
    if ascii_only and not text.isascii():
        text = text.translate(_ASCII)
        if not text.isascii():
            text = "".join(c if c.isascii() else "?" * cell_len(c) for c in text)
    return text


def width_of(line: Iterable[Span]) -> int:
    """The number of terminal cells a line takes."""
    return sum(cell_len(span.text) for span in line)


def plain(line: Iterable[Span]) -> str:
    """The text alone."""
    return "".join(span.text for span in line)


def fit(text: str, width: int) -> str:
    """`text` in at most `width` cells; a cut is marked with an ellipsis."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def fit_end(text: str, width: int) -> str:
    """The end of `text` in at most `width` cells; a cut is marked with an ellipsis."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) >= width:
        text = text[1:]
    return f"…{text}" if width > 0 else ""


def fit_parts(text: str, width: int) -> str:
    """As many whole parts of ``a · b · c`` as `width` cells hold; a first part that is too long is cut."""
    parts = text.split(" · ")
    while len(parts) > 1 and cell_len(" · ".join(parts)) > width:
        parts.pop()
    return fit(" · ".join(parts), width)


def left(text: str, width: int) -> str:
    """`text` cut or padded on the right to exactly `width` cells."""
    cut = fit(text, width)
    return cut + " " * (max(0, width) - cell_len(cut))


def right(text: str, width: int) -> str:
    """`text` cut or padded on the left to exactly `width` cells."""
    cut = fit(text, width)
    return " " * (max(0, width) - cell_len(cut)) + cut


def wrap(text: str, width: int, most: int) -> list[str]:
    """`text` broken at spaces, and words longer than a line within, into at most `most` lines of `width` cells; the
    rest is cut."""
    if width <= 0 or most <= 0:
        return []
    lines: list[str] = []
    line = ""
    for word in (piece for whole in text.split() for piece in chop_cells(whole, width)):
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width or not line:
            line = joined
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fit(line, width) for line in lines]


def cut(lines: Sequence[Line], height: int) -> list[Line]:
    """At most `height` lines; if there are more, the last one says how many are left out."""
    if len(lines) <= height or height <= 0:
        return list(lines[: max(0, height)])
    more = len(lines) - height + 1
    return [*lines[: height - 1], [Span(f" … {more} more rows", "dim")]]


def rule(title: str, width: int, note: str = "") -> Line:
    """A panel's first row: its title, a thin rule, and a note at the right end."""
    shown = fit(f" {title}", width)
    note = fit(note, width - cell_len(shown) - 4) if note else ""
    room = width - cell_len(shown) - 1 - (cell_len(note) + 1 if note else 0)
    line = [Span(shown, "title"), Span(" " + "─" * max(0, room), "dim")]
    if note:
        line.append(Span(" " + note, "dim"))
    return line


def columns(lines: Sequence[Line], others: Sequence[Line], gap: int, split: int) -> list[Line]:
    """Two blocks side by side; the first is padded to `split` cells."""
    joined: list[Line] = []
    for y in range(max(len(lines), len(others))):
        first = list(lines[y]) if y < len(lines) else []
        second = list(others[y]) if y < len(others) else []
        joined.append([*first, Span(" " * max(0, split + gap - width_of(first))), *second])
    return joined
