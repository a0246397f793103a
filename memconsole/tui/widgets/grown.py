"""A widget that is as high as the lines it draws."""

from __future__ import annotations

from textual.geometry import Size

from memconsole.tui.draw.lines import Line
from memconsole.tui.widgets.painted import Painted

MOST = 99


class Grown(Painted):
    """Draws `lines(width, height)`. Its height in the style sheet is `auto`, within limits given there."""

    _rows_wanted = -1

    def lines(self, width: int, height: int) -> list[Line]:
        """The rows to show, at most `height`. Pure in the state."""
        raise NotImplementedError

    def draw(self, width: int, height: int) -> list[Line]:
        return self.lines(width, height)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines(width, MOST)) if width > 0 else 0

    def repaint(self) -> None:
        width = self.content_size.width
        if self.is_attached and width > 0:
            wanted = len(self.lines(width, MOST))
            if wanted != self._rows_wanted:
                self._rows_wanted = wanted
                self.refresh(layout=True)
        super().repaint()
