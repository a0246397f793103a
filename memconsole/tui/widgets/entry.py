"""A one-line text input without blinking cursor or control characters; keys act in order."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.message import Message
from textual.widgets import Input

from memconsole.tui.draw.lines import cleaned


class Entry(Input):
    """Textual's input for the pickers and prompts.

    In Textual, letters act at once but editing keys take a detour through the app, so that quickly
    typed keys can overtake each other. Here editing keys act at once too.
    """

    DIRECT: ClassVar[dict[str, str]] = {
        "backspace": "delete_left",
        "delete": "delete_right",
        "left": "cursor_left",
        "right": "cursor_right",
        "home": "home",
        "end": "end",
        "enter": "submit",
        "ctrl+a": "home",
        "ctrl+e": "end",
        "ctrl+k": "delete_right_all",
        "ctrl+u": "delete_left_all",
        "ctrl+w": "delete_left_word",
    }

    class Ended(Message):
        """Home (`first`) or end was pressed while there is no text."""

        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first

    def __init__(self, value: str = "", placeholder: str = "", *, id: str | None = None) -> None:
        super().__init__(
            cleaned(value), cleaned(placeholder), id=id, compact=True, select_on_focus=True
        )
        self.cursor_blink = False

    @classmethod
    def takes(cls, event: events.Key) -> bool:
        """Whether a key is an entry's own: a character, or one that edits."""
        return event.is_printable or event.key in cls.DIRECT

    def take(self, event: events.Key) -> None:
        """Act on a key that was pressed before the entry had the focus."""
        self.post_message(events.Key(event.key, event.character))

    async def _on_key(self, event: events.Key) -> None:
        action = self.DIRECT.get(event.key)
        if event.key in ("home", "end") and not self.value:
            self.post_message(self.Ended(event.key == "home"))
        if action is not None:
            event.stop()
            event.prevent_default()
            await self.run_action(action)

    def insert_text_at_cursor(self, text: str) -> None:
        super().insert_text_at_cursor(cleaned(text))

    def replace(self, text: str, start: int, end: int) -> None:
        super().replace(cleaned(text), start, end)
