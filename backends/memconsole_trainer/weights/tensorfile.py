"""Reads and writes safetensors files one tensor at a time, so that memory stays bounded.

The format (huggingface/safetensors, README "Format"): 8 bytes of little-endian header length, a
JSON header {name: {dtype, shape, data_offsets}}, then the raw little-endian data. The library's own
NumPy interface needs all tensors of a file at once and does not support bfloat16.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import weakref
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.plan import printable
from memconsole.regular_file import open_descriptor, open_regular

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
_CODES = {name: code for code, name in DTYPES.items()}
_HEADER_LIMIT = 100_000_000
_MOST_DIMENSIONS = 32
"""As in NumPy."""
_WRITE_BLOCK = 16 << 20


class TensorFileError(ValueError):
    """A file is not a valid safetensors file. The message names it."""


def write(path: Path, tensors: Iterable[tuple[str, NDArray[np.generic]]]) -> tuple[int, str]:
    """Write `tensors` to `path` and fsync it. Returns its size in bytes and its SHA-256.

    Raises OSError, also when the disk is full.
    """
    items = [(name, _contiguous(array)) for name, array in tensors]
    header: dict[str, Any] = {}
    offset = 0
    for name, array in items:
        code = _CODES[array.dtype.name]
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            _write_all(file.fileno(), memoryview(part))
            digest.update(part)
        for _, array in items:
            raw = (
                memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
            )
            for start in range(0, len(raw), _WRITE_BLOCK):
                block = raw[start : start + _WRITE_BLOCK]
                _write_all(file.fileno(), block)
                digest.update(block)
        os.fsync(file.fileno())
    return 8 + len(text) + offset, digest.hexdigest()


class TensorFile:
    """One safetensors file. Each tensor is mapped from disk separately, and only while its array is
    alive. With `hold` the file stays open, so that it can be read after it was deleted.

    Raises `TensorFileError` if the file is not valid, and OSError if it cannot be read or is not a
    regular file.
    """

    def __init__(self, path: Path, *, hold: bool = False) -> None:
        self.path = path
        self._held = open_descriptor(path) if hold else None
        if self._held is not None:
            weakref.finalize(self, os.close, self._held)
        try:
            with self._opened() as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(_HEADER_LIMIT, size - 8):
                    raise TensorFileError(f"{path}: not a safetensors file")
                header = json.loads(file.read(length))
        except TensorFileError:
            raise
        except (ValueError, RecursionError):
            raise TensorFileError(f"{path}: damaged safetensors header") from None
        if not isinstance(header, dict):
            raise TensorFileError(f"{path}: damaged safetensors header")
        header.pop("__metadata__", None)
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        places: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            dtype, shape, first, last = _entry(path, name, entry, size - 8 - length)
            self._entries[name] = dtype, shape, first
            places.append((first, last, name))
        _check_apart(path, places)
        self._data_start = 8 + length

    def _opened(self) -> BufferedReader:
        return (
            open_regular(self.path)
            if self._held is None
            else os.fdopen(self._held, "rb", closefd=False)
        )

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1]

    def tensor(self, name: str, widen: bool = False) -> NDArray[np.generic]:
        """The tensor of `name`: a read-only view of the file, little-endian.

        A bfloat16 tensor is returned as float32 with `widen`, or if NumPy has no bfloat16 type (no
        `ml_dtypes`).
        """
        dtype, shape, start = self._entries[name]
        count = math.prod(shape)
        if dtype == "bfloat16":
            raw = self._raw(start, count * 2).view(np.uint16)
            native = None if widen else _bfloat16()
            return raw.view(native).reshape(shape) if native else _widened(raw).reshape(shape)
        kind = np.dtype(dtype)
        return self._raw(start, count * kind.itemsize).view(kind).reshape(shape)

    def _raw(self, start: int, size: int) -> NDArray[np.uint8]:
        if size == 0:
            return np.empty(0, np.uint8)
        first = self._data_start + start
        with self._opened() as file:
            raw = np.asarray(np.memmap(file, np.uint8, "r", offset=first, shape=(size,)))
        # Files of other programs may be unaligned; a view of wider elements needs alignment.
        return raw if first % 8 == 0 else raw.copy()


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
    width = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    sound = first <= last <= data_size and len(shape) <= _MOST_DIMENSIONS
    if not sound or last - first != math.prod(shape) * width:
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


def _contiguous(array: NDArray[np.generic]) -> NDArray[np.generic]:
    array = np.asarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _widened(raw: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bfloat16 bits to float32: the same bits followed by 16 zeros."""
    wide = raw.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _bfloat16() -> Any:
    try:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
