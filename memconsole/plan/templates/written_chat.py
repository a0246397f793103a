"""A chat as a template writes it: what the text leaves out, and where each message is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from memconsole.plan.templates.chat import (
    LEARNED,
    MAIN_ROLES,
    PARTS,
    TOOLS,
    Message,
    RecordError,
    is_learned,
)
from memconsole.plan.templates.message_spans import message_spans
from memconsole.plan.templates.rendered import MARKS, Span

Render = Callable[[Mapping[str, Any], bool], str]
"""Renders a template with variables, and with or without what opens the assistant's next message. Raises
`RecordError`."""


class WrittenChat:
    """A chat and its text."""

    def __init__(
        self,
        render: Render,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        mentioned: Collection[str],
    ) -> None:
        """`variables` are known to the template beside the messages; `mentioned` are the words in its source. Raises
        `RecordError`."""
        self._render, self._messages = render, messages
        self._variables, self._mentioned = variables, mentioned
        self.text = self._write(messages)
        """The text with its marks."""

    def _write(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return self._render({**self._variables, "messages": messages}, prompt)

    def unwritten_parts(self) -> tuple[str, ...]:
        """The parts of the chat that the template neither asks for nor writes along with others."""
        held = {
            name
            for fields in ({TOOLS: self._variables[TOOLS]}, *self._messages)
            for name, value in fields.items()
            if value
        }
        unwritten = []
        for part, fields in PARTS.items():
            held_here = held.intersection(fields)
            if not held_here or not held_here.isdisjoint(self._mentioned):
                continue
            variables, *messages = (
                {name: value for name, value in values.items() if name not in fields}
                for values in (self._variables, *self._messages)
            )
            if self._render({**variables, "messages": messages}, False) == self.text:
                unwritten.append(part)
        return tuple(unwritten)

    def unwritten_and_unknown_roles(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The roles beside the main ones that the template does not mention: those whose messages it does not write, and
        those that it writes as any other. `tool` never counts as unknown."""
        unwritten, unknown = [], []
        for role in dict.fromkeys(m["role"] for m in self._messages if m["content"]):
            if role in MAIN_ROLES or role in self._mentioned:
                continue
            try:
                written = self._write([m for m in self._messages if m["role"] != role]) != self.text
            except RecordError:
                written = True
            if not written:
                unwritten.append(MARKS.sub("", role))
            elif role != "tool":
                unknown.append(MARKS.sub("", role))
        return tuple(unwritten), tuple(unknown)

    def assistant_spans(self) -> tuple[Span, ...]:
        """Where the assistant's messages are. Raises `RecordError`."""
        return self._spans(
            [n for n, message in enumerate(self._messages) if message["role"] == "assistant"]
        )

    def unlearned_spans(self, of_assistant_only: bool) -> tuple[Span, ...]:
        """Where the messages are that are never learned: all, or those of the assistant. Raises `RecordError`."""
        numbers = [
            number
            for number, message in enumerate(self._messages)
            if not is_learned(message) and (message["role"] == "assistant" or not of_assistant_only)
        ]
        try:
            return self._spans(numbers)
        except RecordError as error:
            raise RecordError(
                f"{error}, so that it cannot be left out of the loss; use another data.template, or remove its "
                f"{', '.join(LEARNED)}"
            ) from None

    def _spans(self, numbers: Sequence[int]) -> tuple[Span, ...]:
        """Where the messages of these numbers are in the text without its marks; those without text are left out. Raises
        `RecordError`."""

        def without_marks(position: int) -> int:
            return len(MARKS.sub("", self.text[:position]))

        spans = [
            (without_marks(start), without_marks(end))
            for start, end in message_spans(self._messages, numbers, self._write, self.text)
        ]
        return tuple((start, end) for start, end in spans if start < end)
