"""The footer: the keys that are available, made from the key table."""

from __future__ import annotations

from collections.abc import Sequence

from memconsole.tui.draw.ink import Line, Span, width_of
from memconsole.tui.keys.rows import Key
from memconsole.tui.widgets.painted import Painted

_LAST = ("help", "leave", "dismiss")
"""These rows are never dropped for lack of room."""


def key_line(keys: Sequence[Key], width: int) -> Line:
    """As many footer entries as fit; help and leaving are always among them."""
    shown = [key for key in keys if key.footer and key.label]
    last = [key for key in shown if key.id in _LAST]
    room = width - sum(_width(key) for key in last)
    line: Line = []
    for key in shown:
        if key in last:
            continue
        if _width(key) > room:
            break
        room -= _width(key)
        line += _entry(key)
    for key in last:
        if width_of(line) + _width(key) <= width + 1:
            line += _entry(key)
    return line


def _entry(key: Key) -> Line:
    return [Span(f" {key.shown}", "key"), Span(f" {key.label} ", "dim")]


def _width(key: Key) -> int:
    return width_of(_entry(key))


class KeyBar(Painted):
    """One row at the bottom."""

    _keys: tuple[Key, ...] = ()

    def show(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return [key_line(self._keys, width)]
