"""A picker with type-ahead: given choices, and the typed text if any text is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input

from memconsole.path_completion import completed, completions, looks_like_path
from memconsole.tui.draw.lines import Line, Span, cleaned, fit_parts, left, width_of
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.typing_modal import TypingModal
from memconsole.tui.widgets.choice_list import ChoiceList
from memconsole.tui.widgets.entry import Entry


@dataclass(frozen=True)
class Choice:
    """One row: its value, its name, and a note."""

    value: str
    label: str
    note: str = ""
    label_width: int = 22
    also: str = ""
    """Words that find it and are not shown."""
    sentence: str = ""
    """What the note means, shown above the footer while the row is selected."""


def matching(choices: Sequence[Choice], text: str) -> list[Choice]:
    """The choices that contain every typed word. The choice with exactly this name comes first, then names that start with
    the first word."""
    words = text.lower().split()
    if not words:
        return list(choices)
    matches = [
        c for c in choices if all(word in f"{c.label} {c.note} {c.also}".lower() for word in words)
    ]
    return sorted(
        matches,
        key=lambda c: (
            c.label.lower() != text.strip().lower(),
            text.strip().lower() not in c.also.split("\n"),
            not c.label.lower().startswith(words[0]),
            words[0] not in c.label.lower(),
        ),
    )


class PickScreen(TypingModal, inherit_bindings=False):
    """Type to narrow, arrows to move, enter to choose. Closes with the value or None.

    A note that is too long ends with its last whole part. The selected row's sentence, or its note
    if that is cut, stands above the footer.
    """

    SCREEN = "pick"
    BINDINGS = bindings("pick")

    def __init__(
        self,
        heading: str,
        choices: Sequence[Choice],
        present: str = "",
        free_text: str | None = None,
        *,
        suffixes: tuple[str, ...] | None = None,
    ) -> None:
        """`free_text` names what may be typed instead of a choice. With `suffixes`, paths of folders and of such files
        complete it; an empty tuple allows every file."""
        super().__init__()
        self.heading = heading
        self._choices = tuple(choices)
        self._present = present
        self._free_text = free_text
        self._suffixes = suffixes
        self._found = list(choices)
        self._cursor = next((n for n, c in enumerate(choices) if c.value == present), 0)

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body", classes="form"):
            yield Entry(placeholder="type to narrow", id="entry")
            yield ChoiceList(id="choices")

    def title_line(self) -> tuple[str, str]:
        return self.heading, f"or type a {self._free_text}" if self._free_text else ""

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        text = event.value
        self._found = matching(self._choices, text)
        typed = text.strip()
        if self._free_text and typed and all(c.value != typed for c in self._found):
            self._found.append(Choice(typed, typed, f"as typed: {self._free_text}"))
        if self._suffixes is not None and looks_like_path(typed):
            there = completions(typed, self._suffixes)
            notes = {True: "folder", False: "file"}
            self._found += [
                Choice(name, name, notes[name.endswith("/")]) for name in there if name != typed
            ]
        self._cursor = 0
        self.redraw()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_accept()

    @on(Entry.Ended)
    def _ended(self, message: Entry.Ended) -> None:
        """Home and end move the list while nothing is typed."""
        message.stop()
        self.action_move(-len(self._found) - 1 if message.first else len(self._found) + 1)

    @on(ChoiceList.Clicked)
    def _clicked(self, message: ChoiceList.Clicked) -> None:
        """A click selects a choice; a click on the selected one chooses it."""
        message.stop()
        self._cursor = min(message.row, max(0, len(self._found) - 1))
        self.redraw()
        if message.again:
            self.action_accept()

    def conditions(self) -> set[str]:
        found = super().conditions()
        return found if self._suffixes is None else found | {"paths"}

    def action_complete(self) -> None:
        entry = self.part(Entry)
        entry.value = completed(entry.value, self._suffixes or ())
        entry.cursor_position = len(entry.value)

    def action_move(self, rows: int) -> None:
        if self._found:
            cursor = self._cursor + rows
            last = len(self._found) - 1
            self._cursor = cursor % (last + 1) if abs(rows) == 1 else min(max(0, cursor), last)
            self.redraw()

    def action_accept(self) -> None:
        if self._found:
            self.dismiss(cleaned(self._found[self._cursor].value))

    def draw_body(self) -> None:
        width = max(20, self.size.width)
        lines: list[Line] = []
        below = ""
        for place, choice in enumerate(self._found):
            mark = "●" if choice.value == self._present else " "
            head = [
                Span(f"{mark} ", "accent"),
                Span(left(choice.label, choice.label_width), "strong"),
            ]
            room = width - choice.label_width - 10
            if place == self._cursor:
                cut = width_of([Span(choice.note)]) > room
                below = choice.sentence or (choice.note if cut else "")
            lines.append([*head, Span("  " + fit_parts(choice.note, room), "dim")])
        empty = "nothing matches" if self.part(Entry).value.strip() else "nothing to choose from"
        self.part(ChoiceList).show(lines, self._cursor, empty)
        self.notice(below, "dim")
