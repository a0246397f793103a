"""How long the lines of a file of records are, from its first mebibyte."""

from __future__ import annotations

from pathlib import Path

from memconsole.once_per_version import once_per_version
from memconsole.plan.catalog.compression import first_lines
from memconsole.regular_file import open_regular

MOST_BYTES = 1 << 20


@once_per_version(64)
def line_bytes(path: Path) -> float | None:
    """Mean bytes of a line, decompressed, of those that begin in the first `MOST_BYTES`; None if there is none, as in a file
    that only the trainer can read. Raises `OSError`."""
    with open_regular(path) as file:
        sizes = [len(line) for line in first_lines(file, path.suffix.lower(), MOST_BYTES)]
    if sum(sizes) == MOST_BYTES and len(sizes) > 1:
        del sizes[-1]  # it may be cut
    return sum(sizes) / len(sizes) if sizes else None


def share_of_first(path: Path, text_bytes: float, lines: int) -> float | None:
    """About the share of a file with `text_bytes` of text that its first `lines` lines hold; None if unknown."""
    try:
        each = line_bytes(path)
    except OSError:
        return None
    return None if each is None else min(1.0, lines * each / text_bytes)
