"""Prompts for one line of text; shows what is allowed, and why the text is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input

from memconsole.path_completion import completed, completions
from memconsole.tui.draw.lines import Line, Span, cleaned, wrap
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.typing_modal import TypingModal
from memconsole.tui.widgets.entry import Entry
from memconsole.tui.widgets.text_lines import TextLines

Refusal = Callable[[str], str | None]
"""Returns why a text is refused, in one line, or None."""


def path_refusal() -> Refusal:
    """Refuses an unusable path, and an existing file once: entering it again overwrites it."""
    asked = ""

    def refusal(word: str) -> str | None:
        nonlocal asked
        if not word.strip():
            return "type a file name"
        path = Path(word)
        try:
            path = path.expanduser()
            if path.is_dir():
                return f"{path} is a directory"
            if not path.parent.is_dir():
                return f"{path.parent} is no folder"
            if path.exists() and not path.is_file():
                return f"{path} is no file"
            if path.exists() and word != asked:
                asked = word
                return f"{path} exists; enter again to overwrite it"
        except (OSError, ValueError, RuntimeError) as error:
            return f"{path}: {error}"
        return None

    return refusal


class PromptScreen(TypingModal, inherit_bindings=False):
    """Closes with the text once it is allowed, or with None."""

    SCREEN = "prompt"
    BINDINGS = bindings("prompt")

    def __init__(
        self,
        heading: str,
        text: str,
        about: str,
        refusal: Refusal,
        suffixes: tuple[str, ...] | None = None,
    ) -> None:
        """With `suffixes`, the text is a path; an empty tuple allows every file."""
        super().__init__()
        self._suffixes = suffixes
        self.heading = heading
        self._text = cleaned(text)
        self._about = about
        self._refusal = refusal
        self._problem = ""

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body", classes="form"):
            yield Entry(self._text, id="entry")
            yield TextLines(id="about")

    def title_line(self) -> tuple[str, str]:
        take, leave = self.shown_key("accept"), self.shown_key("dismiss")
        return self.heading, f"{take} accepts it, {leave} cancels"

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_accept()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._problem or self._suffixes is not None:
            self._problem = ""
            self.redraw()

    def conditions(self) -> set[str]:
        found = super().conditions()
        return found if self._suffixes is None else found | {"paths"}

    def action_complete(self) -> None:
        entry = self.part(Entry)
        entry.value = completed(entry.value, self._suffixes or ())
        entry.cursor_position = len(entry.value)

    def action_accept(self) -> None:
        if self.held() and self._problem:
            return
        word = cleaned(self.part(Entry).value)
        self._problem = self._refusal(word) or ""
        if self._problem:
            self.redraw()
        else:
            self.dismiss(self.answer(word))

    def answer(self, word: str) -> object:
        """What the screen closes with once `word` is accepted."""
        return word

    def draw_body(self) -> None:
        width = max(20, self.size.width - 4)
        lines: list[Line] = [[Span(text, "dim")] for text in wrap(self._about, width, 3)]
        lines.append([])
        lines += [[Span(text, "bad")] for text in wrap(self._problem, width, 6)]
        if self._suffixes is not None and not self._problem:
            typed = cleaned(self.part(Entry).value)
            found = [one for one in completions(typed, self._suffixes) if one != typed]
            lines += [[Span(f" {one}", "dim")] for one in found[: max(0, self.size.height - 9)]]
        self.part(TextLines, "about").show(lines)
