"""A text that knows which of its parts are answers."""

from __future__ import annotations

import re

ANSWER, ANSWERED, CUT = "\ufdd0", "\ufdd1", "\ufdd2"
"""Marks within a rendering: where an answer begins and ends, and where the text is tokenized in two
parts. Unicode reserves these characters for such use; data never keep them."""
MARKS = re.compile("[\ufdd0-\ufdd5]")


class Rendered(str):
    """A rendered record or chat."""

    answers: tuple[tuple[int, int], ...]
    """Start and end of each answer, in characters."""
    cuts: tuple[int, ...]
    """No token spans these places. They keep what looks like a control token in the data from
    becoming one."""

    def __new__(
        cls, text: str, answers: tuple[tuple[int, int], ...] = (), cuts: tuple[int, ...] = ()
    ) -> Rendered:
        made = super().__new__(cls, text)
        made.answers, made.cuts = answers, cuts
        return made

    @property
    def ends_with_answer(self) -> bool:
        """Whether nothing but space follows the last answer."""
        return bool(self.answers) and self.answers[-1][1] >= len(self.rstrip())


def of_marked(text: str) -> Rendered:
    """The text without its marks, which become places."""
    parts: list[str] = []
    answers: list[tuple[int, int]] = []
    cuts: list[int] = []
    position = begun = last = 0
    for match in MARKS.finditer(text):
        parts.append(text[last : match.start()])
        position += match.start() - last
        last = match.end()
        if match[0] == ANSWER:
            begun = position
        elif match[0] == ANSWERED and position > begun:
            answers.append((begun, position))
        elif match[0] == CUT:
            cuts.append(position)
    return Rendered("".join([*parts, text[last:]]), tuple(answers), tuple(cuts))
