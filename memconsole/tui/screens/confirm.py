"""Asks before an action that cannot be undone; escape always cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.tui.draw.lines import Line, Span, left, wrap
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.text_lines import TextLines


@dataclass(frozen=True)
class ConfirmAnswer:
    """One answer: its value, and what it does. The key table has a row `VALUE-now` for each value."""

    value: str
    words: str


class ConfirmScreen(ConsoleModal, inherit_bindings=False):
    """Closes with the chosen answer's value, or None."""

    SCREEN = "confirm"
    BINDINGS = bindings("confirm")

    def __init__(self, question: str, answers: Sequence[ConfirmAnswer]) -> None:
        super().__init__()
        self.question = question
        self.answers = tuple(answers)

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body", classes="form"):
            yield TextLines(id="question")

    def draw_body(self) -> None:
        width = max(20, self.size.width - 4)
        lines: list[Line] = [[Span(text, "strong")] for text in wrap(self.question, width, 4)]
        lines.append([])
        rows = [(f"{one.value}-now", one.value, one.words) for one in self.answers]
        for id, value, words in (*rows, ("dismiss", "cancel", "change nothing")):
            lines.append(
                [
                    Span(f" {left(self.shown_key(id), 6)} ", "key"),
                    Span(left(value, 8), "strong"),
                    Span(f" {words}", "dim"),
                ]
            )
        self.part(TextLines, "question").show(lines)

    def title_line(self) -> tuple[str, str]:
        return "sure?", ""

    def conditions(self) -> set[str]:
        found = super().conditions()
        return found | {answer.value for answer in self.answers}

    def action_choose(self, value: str) -> None:
        if not self.held() and any(answer.value == value for answer in self.answers):
            self.dismiss(value)

    @on(TextLines.Clicked)
    def _clicked(self, message: TextLines.Clicked) -> None:
        """A click on an answer chooses it."""
        message.stop()
        first = self.part(TextLines, "question").line_count - len(self.answers) - 1
        number = message.line - first
        if 0 <= number < len(self.answers):
            self.dismiss(self.answers[number].value)
        elif number == len(self.answers):
            self.dismiss(None)
