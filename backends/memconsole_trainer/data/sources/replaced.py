"""Finds texts in which bytes that are not UTF-8 were replaced."""

from __future__ import annotations

from memconsole_trainer.data.sources.documents import DataError, Documents
from memconsole_trainer.data.spread import even_rows

REPLACED = "\N{REPLACEMENT CHARACTER}"
MOST_DOCUMENTS = 256
"""Documents that are looked at, at even distances."""


def replaced_words(name: str, source: Documents) -> str:
    """A warning of documents that hold U+FFFD, with their number; empty if none does, and for a stream."""
    numbers = even_rows(source.count or 0, MOST_DOCUMENTS).tolist()
    found = []
    for number in numbers:
        try:
            found.append(source.read(number, number + 1)[0].count(REPLACED))
        except DataError:
            continue  # reported when its turn comes
    documents = sum(count > 0 for count in found)
    if not documents:
        return ""
    which = "" if len(numbers) == source.count else " that were looked at"
    return (
        f"{name}: {documents:,} of {len(numbers):,} documents{which} hold {sum(found):,} U+FFFD, in place of "
        "bytes that are not UTF-8; save the text as UTF-8"
    )
