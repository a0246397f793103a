"""Reads and writes safetensors files one tensor at a time, so that memory stays bounded.

The library's own NumPy interface needs all tensors of a file at once and does not support bfloat16.
"""

from __future__ import annotations

import hashlib
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

from memconsole.plan.models.tensor_header import DTYPES, read_header
from memconsole.regular_file import open_descriptor, open_regular

_CODES = {name: code for code, name in DTYPES.items()}
_WRITE_BLOCK = 16 << 20


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
        with self._opened() as file:
            self._entries, self._data_start = read_header(path, file)

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

    def dtype(self, name: str) -> str:
        return self._entries[name][0]

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
