"""The footer: the keys that are available, made from the key table."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events

from memconsole.tui.draw.lines import Line, Span, width_of
from memconsole.tui.keys.rows import Key
from memconsole.tui.widgets.painted import Painted

_LAST = ("help", "leave", "dismiss", "go-back")
"""These rows are never dropped for lack of room."""


def key_line(keys: Sequence[Key], width: int) -> Line:
    """As many footer entries as fit; help and leaving are always among them."""
    return [span for key in shown_keys(keys, width) for span in _entry(key)]


def shown_keys(keys: Sequence[Key], width: int) -> list[Key]:
    """The keys of the footer, from left to right."""
    shown = [key for key in keys if key.footer and key.label]
    last = [key for key in shown if key.id in _LAST]
    room = width - sum(_width(key) for key in last)
    in_footer: list[Key] = []
    for key in shown:
        if key in last:
            continue
        if _width(key) > room:
            break
        room -= _width(key)
        in_footer.append(key)
    for key in last:
        if sum(map(_width, in_footer)) + _width(key) <= width + 1:
            in_footer.append(key)
    return in_footer


def key_at(keys: Sequence[Key], width: int, x: int) -> Key | None:
    """The key whose entry of the footer has the cell `x`."""
    end = 0
    for key in shown_keys(keys, width):
        end += _width(key)
        if x < end:
            return key
    return None


def _entry(key: Key) -> Line:
    return [Span(f" {key.shown}", "key"), Span(f" {key.label} ", "dim")]


def _width(key: Key) -> int:
    return width_of(_entry(key))


class KeyBar(Painted):
    """One row at the bottom; its entries are buttons."""

    _keys: tuple[Key, ...] = ()

    def show(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return [key_line(self._keys, width)]

    def on_click(self, event: events.Click) -> None:
        """An entry acts as its key does. The app acts, because an action may remove this widget."""
        event.stop()
        key = key_at(self._keys, self.content_size.width, event.x)
        if key is not None:
            self.app.call_later(self.screen.run_action, key.action)
