"""One field of JSON Lines as texts, read from the lines themselves.

Reading a table by `datasets` takes more than a second and 100 MiB to import its libraries, and writes a copy of the table.
Files that are not large are therefore read here if every line is an object whose field holds text or is missing. Other
files are left to the table reader, which repairs or names what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from memconsole.typed_json import decoder
from memconsole_trainer.data.sources.documents import BlockDocuments, DataError
from memconsole_trainer.data.sources.records import JsonLines

MOST_BYTES = 256 << 20
"""Larger files are left to the table reader, because each start of a run reads all lines to check them."""

CHECKED_LINES = 4096
"""Lines that are read together while all are checked."""


class JsonTexts(BlockDocuments):
    """One field of the lines of `lines`. Implements `Documents`."""

    block_size = 64

    def __init__(self, lines: JsonLines, field: str) -> None:
        self._lines = lines
        self._decoder = decoder(_line_with(field))
        self.total_bytes = lines.total_bytes
        names = [*lines.read(0, 1)[0].fields] if lines.count else []
        # That of the table, so that a run may go on whichever reads the file.
        fingerprint = self.fingerprint_of(lines.count, f"{lines.all_lines}/{field}/{names}")
        super().__init__(lines.count, fingerprint, lines.files, field)

    def holds_text(self) -> bool:
        """Whether the field of a line holds text. Reads all lines; raises `DataError` for one that is no object, or whose
        field holds something else."""
        found = 0
        for start in range(0, self._lines.count, CHECKED_LINES):
            stop = min(start + CHECKED_LINES, self._lines.count)
            found += sum(text is not None for text in self._decoded(start, stop))
        return found > 0

    def texts(self, start: int, stop: int) -> list[str]:
        return [text or "" for text in self._decoded(start, stop)]

    def _decoded(self, start: int, stop: int) -> Iterator[str | None]:
        for line, path, number in self._lines.lines(start, stop):
            try:
                yield self._decoder.decode(line).text
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: line {number:,}: {error}") from None


@lru_cache(maxsize=64)
def _line_with(field: str) -> type[Any]:
    """A line whose text is in this field; its other fields are left out."""
    return msgspec.defstruct("Line", [("text", str | None, None)], rename={"text": field})


def json_texts(
    files: Sequence[Path], plain: Sequence[Path], field: str, most: int | None
) -> JsonTexts | None:
    """The first `most` texts of `files`; None if they are to be read as a table. `plain` are the files to read if `files`
    are compressed."""
    try:
        if sum(path.stat().st_size for path in plain) > MOST_BYTES:
            return None
        found = JsonTexts(JsonLines(files, most, plain), field)
        return found if found.holds_text() else None
    except (OSError, DataError):
        return None
