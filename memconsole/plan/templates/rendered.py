"""A text that knows which of its parts are answers."""

from __future__ import annotations

import re
from typing import Self

ANSWER_START, ANSWER_END, CUT = "\ufdd0", "\ufdd1", "\ufdd2"
"""Marks within a rendering: where an answer begins and ends, and where the text is tokenized in two
parts. Unicode reserves these characters for such use; data never keep them."""
SLOT = "\ufdd3"
"""Stands for the text of an answer in a rendering that leaves the answer open."""
MARKS = re.compile("[\ufdd0-\ufdd5]")
_MARKED = re.compile(f"({MARKS.pattern})")

Span = tuple[int, int]
"""Start and end in a text, in characters."""


class Rendered(str):
    """A rendered record or chat."""

    answers: tuple[Span, ...]
    """Where the answers are."""
    cuts: tuple[int, ...]
    """No token spans these places. They keep what looks like a control token in the data from
    becoming one."""
    only_read: tuple[Span, ...]
    """Where the messages are that are never learned. No answer is in them."""
    unwritten: tuple[str, ...]
    """Parts of the chat, such as its reasoning, that the template does not write."""
    unwritten_roles: tuple[str, ...]
    """Roles whose messages the template does not write."""
    unknown_roles: tuple[str, ...]
    """Roles that the template does not know, and writes as any other."""

    def __new__(
        cls,
        text: str,
        answers: tuple[Span, ...] = (),
        cuts: tuple[int, ...] = (),
        only_read: tuple[Span, ...] = (),
        unwritten: tuple[str, ...] = (),
        unwritten_roles: tuple[str, ...] = (),
        unknown_roles: tuple[str, ...] = (),
    ) -> Self:
        made = super().__new__(cls, text)
        made.answers, made.cuts, made.only_read = answers, cuts, only_read
        made.unwritten, made.unwritten_roles, made.unknown_roles = (
            unwritten,
            unwritten_roles,
            unknown_roles,
        )
        return made

    @property
    def ends_with_answer(self) -> bool:
        """Whether nothing but space follows the last answer."""
        return self._ends_with(self.answers)

    @property
    def ends_only_read(self) -> bool:
        """Whether nothing but space follows the last message that is never learned."""
        return self._ends_with(self.only_read)

    def _ends_with(self, spans: tuple[Span, ...]) -> bool:
        return bool(spans) and spans[-1][1] >= len(self.rstrip())


def from_marked(text: str) -> Rendered:
    """The text without its marks, which become spans and cuts."""
    if text.isascii():
        return Rendered(text)
    answers: list[Span] = []
    cuts: list[int] = []
    parts = _MARKED.split(text)
    position = start = 0
    for part, mark in zip(parts[0::2], parts[1::2], strict=False):
        position += len(part)
        if mark == ANSWER_START:
            start = position
        elif mark == ANSWER_END and position > start:
            answers.append((start, position))
        elif mark == CUT:
            cuts.append(position)
    return Rendered("".join(parts[0::2]), tuple(answers), tuple(cuts))
