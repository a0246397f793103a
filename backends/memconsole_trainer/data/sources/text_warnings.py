"""Warns of texts in which bytes that are not UTF-8 were replaced, and of empty ones."""

from __future__ import annotations

from memconsole_trainer.data.sources.documents import DataError, Documents
from memconsole_trainer.data.spread import even_rows

REPLACED = "\N{REPLACEMENT CHARACTER}"
MOST_DOCUMENTS = 256
"""Documents that are looked at, at even distances."""
EMPTY_SHARE = 0.1
"""A larger share of empty documents is warned of."""


def text_warnings(name: str, source: Documents) -> tuple[str, ...]:
    """Warnings of documents that hold U+FFFD, and of many that are empty; none for a stream."""
    numbers = even_rows(source.count or 0, MOST_DOCUMENTS).tolist()
    found, empty = [], 0
    for number in numbers:
        try:
            text = source.read(number, number + 1)[0]
        except DataError:
            continue  # reported when its turn comes
        found.append(text.count(REPLACED))
        empty += not text
    which = "" if len(numbers) == source.count else " that were looked at"
    replaced = sum(count > 0 for count in found)
    warnings = []
    if replaced:
        warnings.append(
            f"{name}: {replaced:,} of {len(numbers):,} documents{which} hold {sum(found):,} U+FFFD, in place of "
            "bytes that are not UTF-8, or of half an escaped pair (\\ud800); save the text as UTF-8"
        )
    if empty > EMPTY_SHARE * len(numbers):
        warnings.append(
            f"{name}: {empty:,} of {len(numbers):,} documents{which} hold no text; they are not learned"
        )
    return tuple(warnings)
