"""How much text a Parquet file holds, read from its footer.

A footer is a struct of Thrift's compact protocol (https://parquet.apache.org/docs/file-format/metadata/). It is small,
and the console need not load a library for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from memconsole.once_per_version import once_per_version
from memconsole.regular_file import open_regular

FOOTER_BYTES = 1 << 20
"""A longer footer is not read."""
MAGIC = b"PAR1"
LENGTH_BYTES = 4
"""Bytes of the length before each text."""
_ROW_COUNT, _ROW_GROUPS = 3, 4
_CHUNKS = 1
_CHUNK_DATA = 3
_PATH, _VALUES, _PLAIN_BYTES, _STATISTICS = 3, 5, 6, 16
_TEXT_BYTES = 1
"""Numbers of fields of `FileMetaData`, `RowGroup`, `ColumnChunk`, `ColumnMetaData` and `SizeStatistics`."""


class ColumnSize(NamedTuple):
    """What the footer says of a column of text."""

    rows: int
    bytes: int
    """UTF-8 bytes of the texts. Files of old writers do not state them: it is the size of the column without
    compression."""


def column_size(path: Path, column: str) -> ColumnSize | None:
    """The size of a column of a Parquet file; None if it has no such column, or its footer cannot be read."""
    try:
        return _sizes(path).get(column)
    except OSError:
        return None


@once_per_version(256)
def _sizes(path: Path) -> dict[str, ColumnSize]:
    try:
        footer = _Compact(_footer(path)).struct()
        found: dict[str, ColumnSize] = {}
        for group in footer[_ROW_GROUPS]:
            for chunk in group[_CHUNKS]:
                data = chunk[_CHUNK_DATA]
                name = data[_PATH][0].decode()
                plain = max(0, data[_PLAIN_BYTES] - LENGTH_BYTES * data[_VALUES])
                text = data.get(_STATISTICS, {}).get(_TEXT_BYTES, plain)
                before = found[name].bytes if name in found else 0
                found[name] = ColumnSize(footer[_ROW_COUNT], before + text)
        return found
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _footer(path: Path) -> bytes:
    with open_regular(path) as file:
        file.seek(-8, os.SEEK_END)
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != MAGIC or length > FOOTER_BYTES:
            raise ValueError("no footer that is read")
        file.seek(-8 - length, os.SEEK_END)
        return file.read(length)


class _Compact:
    """Reads values of Thrift's compact protocol: structs as dictionaries by the numbers of their fields."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            found[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return found

    def _value(self, kind: int) -> Any:
        if kind in (1, 2, 3):  # a truth value in a list, or a byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15) for _ in range(size)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"type {kind} is in no footer")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError("a footer ends too soon")
        self._at += count
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
