"""A widget that shows given lines: headers, notices, forms' messages, scrolled text."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.message import Message

from memconsole.tui.draw.lines import Line
from memconsole.tui.widgets.painted import Painted


class TextLines(Painted):
    """Shows given lines, from a first row that can be scrolled."""

    class Clicked(Message):
        """A line was clicked."""

        def __init__(self, line: int) -> None:
            super().__init__()
            self.line = line

    _given: tuple[Line, ...] = ()
    _offset: int = 0

    def show(self, lines: Sequence[Line]) -> None:
        self._given = tuple(lines)
        self.repaint()

    @property
    def line_count(self) -> int:
        """How many lines were given."""
        return len(self._given)

    def on_click(self, event: events.Click) -> None:
        line = self._offset + event.y
        if line < len(self._given):
            event.stop()
            self.post_message(self.Clicked(line))

    def scroll_by(self, rows: int) -> None:
        """Move the first row, within the text."""
        most = max(0, len(self._given) - self.content_size.height)
        self._offset = min(max(0, self._offset + rows), most)
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        first = min(self._offset, max(0, len(self._given) - height))
        return list(self._given[first : first + height])
