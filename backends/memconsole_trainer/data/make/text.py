"""Makes short stories as plain text, one per paragraph, with a blank line between two.

A story is ten sentences. The form of each sentence and the words in it are drawn independently and
uniformly from the lists of `story_words`, so the entropy of a story is known exactly: no model
can encode new stories in fewer bits on average. Drawn words occur again later in the story: who helps,
what was lost and where; and how it ends follows from what went wrong. A model has to learn to look back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from memconsole_trainer.data.make import story_words as words
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts, Request

TOLD_TOGETHER = 1024
"""Stories drawn and written together."""
_FORMS = tuple(len(forms) for forms in words.SENTENCES)
SIZES = (
    len(words.HEROES), len(words.KINDS), len(words.FRIENDS), len(words.ANIMALS), len(words.PLACES),
    len(words.COLOURS), len(words.THINGS), len(words.WEATHERS), len(words.HOBBIES),
    len(words.TROUBLES), *_FORMS,
)  # fmt: skip
"""The number of words or forms to choose from, at each place where one is drawn."""
STORY_BITS = sum(map(math.log2, SIZES))
"""Entropy of one story in bits: the sum over all draws, since every draw can be recovered from the text."""


def story(drawn: Sequence[int]) -> str:
    """The story of one draw, a number below each of `SIZES`."""
    hero, kind, friend, animal, place, colour, thing, weather, hobby, trouble, *forms = drawn
    name, he, him, his = words.HEROES[hero]
    wrong = words.TROUBLES[trouble]
    return "".join(
        [sentences[form] for sentences, form in zip(words.SENTENCES, forms, strict=True)]
    ).format(
        hero=name,
        he=he,
        He=he.capitalize(),
        him=him,
        his=his,
        His=his.capitalize(),
        kind=words.KINDS[kind],
        friend=words.FRIENDS[friend],
        animal=words.ANIMALS[animal],
        place=words.PLACES[place],
        colour=words.COLOURS[colour],
        thing=words.THINGS[thing],
        weather=words.WEATHERS[weather],
        hobby=words.HOBBIES[hobby],
        wrong=wrong.happens,
        help=wrong.help,
        end=wrong.end,
        lesson=wrong.lesson,
    )


def make(request: Request, bar: Bar) -> Facts:
    """Write stories until they have `request.size` bytes; the last one is whole."""
    wanted = request.size.count or request.size.size_bytes or 0
    draw = np.random.default_rng(request.seed)
    written = stories = 0
    with open(request.out, "wb") as file:
        for paragraphs in _endless(draw):
            text = "".join(paragraphs)
            if written + len(text) >= wanted:
                paragraphs = _until(paragraphs, wanted - written)
                text = "".join(paragraphs)
            written += file.write(text.encode("ascii"))
            stories += len(paragraphs)
            bar.at(min(written, wanted), wanted)
            if written >= wanted:
                break
    return {
        "stories": stories,
        "size_bytes": written,
        "least_bits_per_byte": round(STORY_BITS * stories / written, 4),
    }


def _endless(draw: np.random.Generator) -> Iterator[list[str]]:
    """Paragraphs, `TOLD_TOGETHER` at a time."""
    while True:
        drawn = draw.integers(0, SIZES, (TOLD_TOGETHER, len(SIZES))).tolist()
        yield [story(one) + "\n\n" for one in drawn]


def _until(paragraphs: list[str], size: int) -> list[str]:
    """The first paragraphs that have `size` characters together."""
    ends = np.cumsum([len(text) for text in paragraphs])
    return paragraphs[: int(np.searchsorted(ends, size)) + 1]
