"""Reads the header of a safetensors file, and checks that its tensors lie inside the file.

The format (huggingface/safetensors, README "Format"): 8 bytes of little-endian header length, a
JSON header {name: {dtype, shape, data_offsets}}, then the raw little-endian data.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from memconsole.plan.plan import printable

DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
WIDTHS = {
    name: 1 if name == "bool" else int("".join(filter(str.isdigit, name))) // 8
    for name in DTYPES.values()
}
"""Bytes of an element."""
_HEADER_LIMIT = 100_000_000
_MOST_DIMENSIONS = 32
"""As in NumPy."""


class TensorFileError(ValueError):
    """A file is not a valid safetensors file. The message names it."""


class Header(NamedTuple):
    """What a file says of its tensors."""

    entries: dict[str, tuple[str, tuple[int, ...], int]]
    """Type, shape and first byte in the data of each tensor."""
    data_start: int
    """The first byte of the data in the file."""


def read_header(path: Path, file: BufferedReader) -> Header:
    """The header of `file`, which messages call `path`. Raises `TensorFileError` and `OSError`."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(_HEADER_LIMIT, size - 8):
        raise TensorFileError(f"{path}: not a safetensors file")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise TensorFileError(f"{path}: damaged safetensors header") from None
    if not isinstance(header, dict):
        raise TensorFileError(f"{path}: damaged safetensors header")
    header.pop("__metadata__", None)
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    places: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, first, last = _entry(path, name, entry, size - 8 - length)
        entries[name] = dtype, shape, first
        places.append((first, last, name))
    _check_apart(path, places)
    return Header(entries, 8 + length)


def _entry(
    path: Path, name: str, entry: Any, data_size: int
) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, and first and last byte in the data of one tensor."""
    name = printable(name)
    try:
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(_count(n) for n in entry["shape"])
        first, last = (_count(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise TensorFileError(f"{path}: {name} has an unreadable header entry") from None
    sound = first <= last <= data_size and len(shape) <= _MOST_DIMENSIONS
    if not sound or last - first != math.prod(shape) * WIDTHS[dtype]:
        raise TensorFileError(f"{path}: {name} does not lie inside the file (truncated?)")
    return dtype, shape, first, last


def _count(value: Any) -> int:
    """A whole number of at least 0 within 64 bits. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError
    return value


def _check_apart(path: Path, places: list[tuple[int, int, str]]) -> None:
    """Raise `TensorFileError` if two tensors share bytes of the file."""
    places.sort()
    for (_, last, name), (first, end, other) in itertools.pairwise(places):
        if first < last and first < end:
            words = f"{printable(name)} and {printable(other)}"
            raise TensorFileError(f"{path}: {words} lie in the same bytes of the file")
