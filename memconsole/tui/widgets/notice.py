"""A notice above the footer: what was done, in three rows at most, or why something is refused, in up to eight."""

from __future__ import annotations

from textual.geometry import Size

from memconsole.tui.draw.lines import Line, Span, cleaned, wrap
from memconsole.tui.widgets.painted import Painted

ROWS = 3
REASON_ROWS = 8
"""The most rows of a refusal. It has more than other notices, because its end says what to do instead."""


class Notice(Painted):
    """Hidden while there is no notice."""

    _words = ""
    _role = ""

    def show(self, words: str, role: str) -> None:
        width = self.content_size.width
        rows = len(self._wrapped(width))
        self._words, self._role = cleaned(words), role
        self.display = bool(words)
        if len(self._wrapped(width)) != rows:
            self.refresh(layout=True)
        self.repaint()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._wrapped(width))

    def draw(self, width: int, height: int) -> list[Line]:
        return [[Span(f" {row}", self._role)] for row in self._wrapped(width)[:height]]

    def _wrapped(self, width: int) -> list[str]:
        return wrap(self._words, width - 1, REASON_ROWS if self._role == "bad" else ROWS)
