"""Compressed tables, unpacked once into the cache, because a line of a compressed file cannot be read without
all the lines before it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import lzma
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memconsole.plan.catalog.compression import decompressed
from memconsole.plan.catalog.folders import PACKED, plain_suffix
from memconsole.regular_file import open_regular
from memconsole.runs.record.spares import FULL
from memconsole.units import format_bytes
from memconsole_trainer.data import disk_cache
from memconsole_trainer.data.sources.documents import DataError, NoRoomError

PIECE_BYTES = 4 << 20
_HELD: dict[Path, int] = {}
"""The locks that keep this process's unpacked files from being deleted."""


def unpacked(path: Path, most_bytes: int, tick: Callable[[], None]) -> Path:
    """The unpacked content of a compressed file; other files as they are.

    Cache entries of other data are deleted first if the cache would otherwise take more than `most_bytes` or
    fill the disk. `tick` is called from time to time and may raise. Raises `DataError`.
    """
    if path.suffix.lower() not in PACKED:
        return path
    try:
        state = path.stat()
        key = disk_cache.key(path.absolute(), state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        folder = disk_cache.root() / key
        whole = folder / f"rows{plain_suffix(path.name)}"
        _hold(folder, whole, tick)
        if not whole.exists():
            _unpack(path, whole, most_bytes, tick)
        fcntl.flock(_HELD[folder], fcntl.LOCK_SH)
    except OSError as error:
        raise _problem(path, error) from None
    return whole


def _hold(folder: Path, whole: Path, tick: Callable[[], None]) -> None:
    """Lock `folder`: for reading if the file is there, else for writing it. Waits for a process that
    writes it."""
    if folder in _HELD:
        return
    while True:
        held = disk_cache.lock(folder, shared=whole.exists())
        if held is not None:
            _HELD[folder] = held
            return
        tick()
        time.sleep(0.2)


def _unpack(path: Path, whole: Path, most_bytes: int, tick: Callable[[], None]) -> None:
    """Write the content of `path` to `whole`, which appears when it is complete."""
    folder, part = whole.parent, whole.with_suffix(".part")
    print(f"  {path.name} is unpacked into {folder}", file=sys.stderr, flush=True)
    expected = int(path.stat().st_size * PACKED[path.suffix.lower()])
    over = disk_cache.others(folder) + expected - most_bytes
    disk_cache.make_room(folder, max(over, expected - disk_cache.free_bytes(folder)))
    try:
        with part.open("wb") as out:
            for piece in _pieces(path):
                if disk_cache.free_bytes(folder) < len(piece) and not disk_cache.make_room(
                    folder, len(piece)
                ):
                    spared = format_bytes(disk_cache.SPARED_BYTES)
                    raise OSError(
                        errno.ENOSPC,
                        f"no room: {spared} of the disk are left for checkpoints",
                        str(part),
                    )
                out.write(piece)
                tick()
            out.flush()
            os.fsync(out.fileno())
        part.rename(whole)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a compressed file in pieces. Raises `DataError` for a damaged file."""
    with open_regular(path) as raw:
        try:
            with _opened(raw, path.suffix.lower()) as file:
                while piece := bytes(file.read(PIECE_BYTES)):
                    yield piece
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: cannot be unpacked: {error}") from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise DataError(f"{path}: cannot be unpacked: {error}") from None


def _opened(raw: Any, suffix: str) -> Any:
    found = decompressed(raw, suffix)
    if found is not None:
        return found
    import pyarrow  # `datasets` brings it; before Python 3.14 the standard library has no zstd

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")


def _problem(path: Path, error: OSError) -> DataError:
    """Why a file could not be unpacked."""
    if error.filename is not None and Path(error.filename) == path:
        return DataError(f"{path}: cannot be read: {error.strerror}")
    where = disk_cache.root()
    kind = NoRoomError if error.errno in FULL else DataError
    return kind(f"{path}: cannot be unpacked into {where}: {error.strerror or error}")
