"""Asks before something that cannot be taken back; escape is always the way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.tui.ink import Line, Span, left, wrap
from memconsole.tui.keys import bindings
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.text_lines import TextLines


@dataclass(frozen=True)
class Answer:
    """One answer: its key (`s` for the first, `k` for the second), its value, what it does."""

    key: str
    value: str
    words: str


class ConfirmScreen(ConsoleModal, inherit_bindings=False):
    """Dismissed with the chosen answer's value, or None."""

    SCREEN = "confirm"
    BINDINGS = bindings("confirm")

    def __init__(self, question: str, answers: Sequence[Answer]) -> None:
        super().__init__()
        self.question = question
        self.answers = tuple(answers)

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body", classes="form"):
            yield TextLines(id="question")

    def on_mount(self) -> None:
        width = max(20, self.size.width - 4)
        lines: list[Line] = [[Span(text, "strong")] for text in wrap(self.question, width, 4)]
        lines.append([])
        for answer in self.answers:
            lines.append(
                [
                    Span(f"  {answer.key}  ", "key"),
                    Span(left(answer.value, 8), "strong"),
                    Span(f" {answer.words}", "dim"),
                ]
            )
        lines.append(
            [Span(" esc ", "key"), Span("cancel", "strong"), Span("   change nothing", "dim")]
        )
        self.query_one("#question", TextLines).show(lines)

    def title_line(self) -> tuple[str, str]:
        return "sure?", ""

    def conditions(self) -> set[str]:
        found = super().conditions()
        if len(self.answers) > 1:
            found.add("second")
        return found

    def action_choose(self, which: str) -> None:
        number = {"first": 0, "second": 1}[which]
        if number < len(self.answers):
            self.dismiss(self.answers[number].value)
