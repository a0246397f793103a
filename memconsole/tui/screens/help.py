"""The help screen: the rows of the key table, this screen's first."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.tui.draw.ink import Line, Span, left, rule, wrap
from memconsole.tui.keys.rows import MAIN, MODAL, bindings
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.text_lines import TextLines

_TITLES = {
    "plan": "plan screen",
    "run": "run screen",
    "runs": "all runs",
    "devices": "devices",
    "pick": "choosing",
    "prompt": "typing",
    "confirm": "before it cannot be undone",
    "help": "help",
    "command": "command line",
    "compare": "runs side by side",
    "plans": "plans side by side",
}
_WORDS = (
    "● on, ○ off, ✗ not trained by this backend, * pinned; ~ formula, = traced, ✓ calibrated.",
    "A gauge's bar: █ now, ▒ the highest so far, ┃ the predicted peak. The number at its right end is its scale. The chart "
    "below it is its history on the same scale, with the prediction dotted.",
    "A gauge is yellow above the prediction's band or from 85 % of what the run may use, and red from 95 %.",
    "The mouse is left to the terminal: select and copy text as usual.",
    "Other keys: `memconsole keys` prints a file of all of them, to be kept as keys.toml under ~/.config/memconsole.",
    "After a dropped connection the terminal may need the command: reset",
)


def help_lines(keys: KeyTable, current: str, width: int) -> list[Line]:
    """Every row of the table, `current` screen first.

    A row with the same keys on several screens is listed once.
    """
    lines: list[Line] = []
    order = [current, *(s for s in (*MAIN, *MODAL) if s != current)]
    seen: set[tuple[str, str]] = set()
    for screen in order:
        rows = [key for key in keys.rows(screen) if (key.id, key.keys) not in seen]
        if not rows:
            continue
        lines.append(rule(_TITLES[screen], width))
        for key in rows:
            seen.add((key.id, key.keys))
            shown = key.all_shown
            for n, part in enumerate(wrap(key.help, width - 18, 3)):
                lines.append([Span(f" {left(shown if n == 0 else '', 16)}", "key"), Span(part)])
        lines.append([])
    lines.append(rule("signs", width))
    for words in _WORDS:
        lines += [[Span(f" {part}", "dim")] for part in wrap(words, width - 2, 3)]
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
