"""Refuses null in the place of an object of a JSON file. pyarrow 26 reads such a file in blocks, and a block that begins
with null ends the process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from memconsole.plan.plan import printable
from memconsole.regular_file import open_regular
from memconsole_trainer.data.sources import json_objects
from memconsole_trainer.data.sources.documents import DataError

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 100
"""Bytes by which `datasets` tells an array of objects from one of texts."""
OVERLAP_BYTES = 1 << 12
"""More blanks than this are not expected around null."""
_LINE = re.compile(rb"\n[ \t\r]*null[ \t\r]*\n")
_ELEMENT = re.compile(rb"[\[,][ \t\r\n]*null[ \t\r\n]*[,\]]")
_BOM = b"\xef\xbb\xbf"


def check(path: Path, lines: bool) -> None:
    """Raise `DataError`, which names the line or the row, if null is among the objects of a file. `lines`: each line is an
    object. Otherwise the file may also be an array, or hold objects that take several lines."""
    with open_regular(path) as file:
        head = file.read(HEAD_BYTES).removeprefix(_BOM).lstrip()
    array = not lines and head.startswith(b"[")
    if array and b"{" not in head.split(b'"', 1)[0]:
        return
    found: int = _has_null_element(path) if array else _null_line(path)
    # Null may be inside of an object, too.
    if not found or (not lines and json_objects.places(path) is not None):
        return
    place = _row(path) if array else f"line {found:,}"
    if place:
        raise DataError(f"{printable(str(path))}: {place}: holds no object with fields")


def _null_line(path: Path) -> int:
    """The number of the first line that is null; 0 if none is."""
    rest, number = b"\n", 0
    for block in _blocks(path, b"\n"):
        data = rest + block
        if match := _LINE.search(data):
            return number + data.count(b"\n", 0, match.start() + 1)
        kept = max(data.rfind(b"\n"), len(data) - OVERLAP_BYTES)
        number += data.count(b"\n", 0, kept)
        rest = data[kept:]
    return 0


def _has_null_element(path: Path) -> bool:
    """Whether null is an element of some array in the file."""
    rest = b""
    for block in _blocks(path, b""):
        data = rest + block
        if _ELEMENT.search(data):
            return True
        rest = data[-OVERLAP_BYTES:]
    return False


def _blocks(path: Path, last: bytes) -> Iterator[bytes]:
    """The content of a file without the byte order mark, and then `last`."""
    with open_regular(path) as file:
        block = file.read(BLOCK_BYTES).removeprefix(_BOM)
        while block:
            yield block
            block = file.read(BLOCK_BYTES)
    yield last


def _row(path: Path) -> str:
    """Which element of an array is null; empty if none is, or the file is no JSON."""
    with open_regular(path) as file:
        try:
            rows = json.loads(file.read())
        except (ValueError, RecursionError):
            return ""
    return next((f"row {n:,}" for n, row in enumerate(rows, 1) if row is None), "")
