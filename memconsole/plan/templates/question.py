"""A rendering up to its answers, and how they are found in the text that a model generates."""

from __future__ import annotations

import re
from typing import NamedTuple

from memconsole.plan.templates.rendered import SLOT, Rendered, from_marked

_NUMBERED_SLOT = re.compile(f"{SLOT}([0-9]+){SLOT}")


def numbered_slot(number: int) -> str:
    """What stands for answer `number` in a rendering that leaves the answers open."""
    return f"{SLOT}{number}{SLOT}"


class Question(NamedTuple):
    """A rendering up to its answer, and how its answers are separated."""

    prompt: Rendered
    names: tuple[str, ...]
    """The answers, in the order in which they are written."""
    between: tuple[str, ...]
    """The text before, between and after them: one more than there are answers."""

    @classmethod
    def of_open(cls, before: str, text: str, names: tuple[str, ...]) -> Question:
        """The question of `text`, a rendering with a numbered slot for each of the answers `names`. `before` is the
        rendering up to the first answer."""
        prompt = from_marked(before)
        rest = str(from_marked(_NUMBERED_SLOT.sub(lambda slot: f"\0{slot[1]}\0", text)))
        rest = rest[len(prompt) :] if rest.startswith(prompt) else rest
        parts = rest.split("\0")
        in_order = tuple(names[int(number)] for number in parts[1::2])
        return cls(prompt, in_order, tuple(parts[0::2]))

    def parse(self, generated: str) -> dict[str, str]:
        """The answers in a generated text, by name. An answer that is not there is empty."""
        answers = dict.fromkeys(self.names, "")
        first, *separators = (text.strip().lower() for text in self.between)
        rest = generated.lstrip()
        if first and rest.lower().startswith(first):
            rest = rest[len(first) :]
        for name, separator in zip(self.names, separators, strict=True):
            # Not by the lower case of the text, which may be longer than the text.
            found = re.search(re.escape(separator), rest, re.IGNORECASE) if separator else None
            answer, rest = (rest[: found.start()], rest[found.end() :]) if found else (rest, "")
            answers[name] = answer.strip()
        return answers
