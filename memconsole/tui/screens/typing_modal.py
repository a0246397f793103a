"""A modal screen with one entry, in which keys count that were typed before it could take them."""

from __future__ import annotations

from textual import events

from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.entry import Entry


class TypingModal(ConsoleModal, inherit_bindings=False):
    """Pickers and prompts. Over a slow link several keys arrive at once: the one that opens the screen, and what is
    typed into it."""

    def __init__(self) -> None:
        super().__init__()
        self._early: list[events.Key] = []

    def on_mount(self) -> None:
        self.set_focus(self.part(Entry))
        for key in self._early:
            self.part(Entry).take(key)

    def typed_early(self, event: events.Key) -> bool:
        if not Entry.takes(event):
            return False
        if self.composed and self.focused is not None:
            self.part(Entry).take(event)
        else:
            self._early.append(event)
        return True
