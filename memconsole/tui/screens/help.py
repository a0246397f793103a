"""The help screen: the rows of the key table in groups, this screen's first."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.tui.draw.lines import Line, Span, columns, left, rule, wrap
from memconsole.tui.keys.groups import OPTIMIZATIONS, TITLES, Group, all_groups
from memconsole.tui.keys.rows import bindings
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.text_lines import TextLines

COLUMN_CELLS, GAP = 48, 2
_WORDS = (
    "● on, ○ off, ✗ not trained by this backend, * pinned; ~ formula, = traced, ✓ calibrated.",
    "A gauge's bar: █ now or at the run's end, ▒ the highest so far, ┃ the predicted peak. The number at its right end is its scale. The chart "
    "below it is its history on the same scale, with the prediction dotted.",
    "A gauge is yellow above the prediction's band (above 10 % where it has none) or from 85 % of what the run may use, and red from 95 %.",
    "Mouse: a click selects a row, a second one opens it; entries of the footer are buttons. Hold shift to select text, or "
    "leave the mouse to the terminal with its key.",
    "Other keys: `memconsole keys` prints a file of all of them, to be kept as keys.toml under ~/.config/memconsole.",
    "After a dropped connection the terminal may need the command: reset",
)


def help_lines(keys: KeyTable, current: str, width: int) -> list[Line]:
    """Every row of the table in groups, those of the `current` screen first, in as many columns as
    fit; then the signs."""
    lines: list[Line] = []
    for screen, groups in all_groups(keys, current):
        if screen != current:
            lines.append([Span(f" {TITLES[screen]}", "strong")])
        lines += [*_in_columns(groups, width), []]
    lines.append(rule("signs", width))
    for words in _WORDS:
        lines += [[Span(f" {part}", "dim")] for part in wrap(words, width - 2, 9)]
    return lines


def _in_columns(groups: Sequence[Group], width: int) -> list[Line]:
    """The groups under each other, in columns of about the same height."""
    many = max(1, min(len(groups), (width + GAP) // (COLUMN_CELLS + GAP)))
    cells = (width - GAP * (many - 1)) // many
    blocks = [_group_lines(group, cells) for group in groups]
    height = sum(map(len, blocks)) / many
    parts: list[list[Line]] = [[]]
    for n, block in enumerate(blocks):
        left_over = len(blocks) - n
        if parts[-1] and len(parts) < many:
            full = len(parts[-1]) + len(block) / 2 > height
            if full or left_over <= many - len(parts):
                parts.append([])
        parts[-1] += block
    joined = parts[0]
    for n, part in enumerate(parts[1:], 1):
        joined = columns(joined, part, GAP, n * (cells + GAP) - GAP)
    return joined


def _group_lines(group: Group, width: int) -> list[Line]:
    """A rule with the title, then a row per key; optimizations side by side, by their names."""
    lines = [rule(group.title, width)]
    if group.title == OPTIMIZATIONS:
        most = max(len(key.label) for key in group.rows) + 6
        across = max(1, width // most)
        for n in range(0, len(group.rows), across):
            line: Line = []
            for key in group.rows[n : n + across]:
                line += [
                    Span(f" {left(key.all_shown, 3)} ", "key"),
                    Span(left(key.label, most - 5)),
                ]
            lines.append(line)
        return lines
    keys = min(16, max(len(key.all_shown) for key in group.rows))
    for key in group.rows:
        for n, part in enumerate(wrap(key.help, width - keys - 3, 4)):
            lines.append(
                [Span(f" {left(key.all_shown if n == 0 else '', keys)} ", "key"), Span(part)]
            )
    return lines


class HelpScreen(ConsoleModal, inherit_bindings=False):
    """Scrolls with the arrows."""

    SCREEN = "help"
    BINDINGS = bindings("help")

    def __init__(self, current: str) -> None:
        super().__init__()
        self._current = current

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body", classes="form"):
            yield TextLines(id="text")

    def draw_body(self) -> None:
        width = max(20, self.size.width - 4)
        lines = help_lines(self.console.keys, self._current, width)
        self.part(TextLines, "text").show(lines)

    def title_line(self) -> tuple[str, str]:
        return "keys", "arrows scroll"

    def action_move(self, rows: int) -> None:
        self.part(TextLines, "text").scroll_by(rows)
