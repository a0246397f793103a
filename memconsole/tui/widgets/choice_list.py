"""A list with one selected row; the viewport follows the selection."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.message import Message

from memconsole.tui.draw.lines import Line, Span, width_of
from memconsole.tui.widgets.painted import Painted


def viewport(cursor: int, count: int, height: int, first: int) -> int:
    """The first visible row, moved from `first` only as far as needed to show `cursor`."""
    if height <= 0 or count <= height:
        return 0
    if cursor < first:
        first = cursor
    elif cursor >= first + height:
        first = cursor - height + 1
    return min(max(0, first), count - height)


def selected(line: Line, width: int) -> Line:
    """`line` as the selected row: marked, and highlighted over the whole width."""
    marked = [Span(span.text, f"{span.role}@cursor") for span in line]
    return [*marked, Span(" " * max(0, width - width_of(line)), "@cursor")]


class ChoiceList(Painted):
    """Rows with a cursor. The owner keeps the cursor; this widget shows it."""

    class Clicked(Message):
        """A row was clicked; `again` if it was the selected one."""

        def __init__(self, row: int, again: bool) -> None:
            super().__init__()
            self.row, self.again = row, again

    _choices: tuple[Line, ...] = ()
    _cursor: int = 0
    _first: int = 0
    _empty: str = ""

    def show(self, choices: Sequence[Line], cursor: int, empty: str = "nothing matches") -> None:
        self._choices, self._cursor, self._empty = tuple(choices), cursor, empty
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        if not self._choices:
            return [[Span(f"  {self._empty}", "dim")]]
        self._first = viewport(self._cursor, len(self._choices), height, self._first)
        lines: list[Line] = []
        for n in range(self._first, min(self._first + height, len(self._choices))):
            mark = Span("› " if n == self._cursor else "  ", "accent")
            line = [mark, *self._choices[n]]
            lines.append(selected(line, width) if n == self._cursor else line)
        return lines

    def on_click(self, event: events.Click) -> None:
        row = self._first + event.y
        if row < len(self._choices):
            event.stop()
            self.post_message(self.Clicked(row, row == self._cursor))
