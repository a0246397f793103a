"""A modal screen with one entry. It also takes keys that were typed before the entry had the focus."""

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
        if not self.is_mounted:
            self._early.append(event)
            return True
        if self.focused is None:  # a window that was too small for the entry took its focus
            self.set_focus(self.part(Entry))
        self.part(Entry).take(event)
        return True
