"""Writes small records on a full disk, into files whose space was taken beforehand.

A run keeps a few such files. Whoever has to write a record and finds no room takes one by renaming
it, overwrites it and renames it into place. The supervisor makes new ones once there is room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

import msgspec

from memconsole.runs.record import files

SPARES = 8
SPARE_BYTES = 8192
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The error numbers of a full disk and of an exhausted quota."""


def keep(folder: Path) -> None:
    """Make the spare files that are missing, as far as there is room."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(SPARES):
            path = folder / str(number)
            if not path.exists():
                files.write_atomic(path, bytes(SPARE_BYTES))


def write_struct(folder: Path, path: Path, record: msgspec.Struct) -> None:
    """`files.write_struct`; on a full disk with one of the spare files in `folder`.

    Raises `OSError`, also if no spare file is left or the record is longer than one.
    """
    try:
        files.write_struct(path, record)
    except OSError as error:
        if error.errno not in FULL or not _put(folder, path, msgspec.json.encode(record) + b"\n"):
            raise


def reserve(folder: Path, path: Path, size: int) -> None:
    """Make a file of `size` zero bytes, to be written in place; on a full disk from one of the spare files in `folder`.

    Raises `OSError`, also if no spare file is left or one is smaller.
    """
    try:
        files.write_atomic(path, bytes(size), durable=False)
    except OSError as error:
        if error.errno not in FULL or not _put(folder, path, bytes(size)):
            raise


def _put(folder: Path, path: Path, content: bytes) -> bool:
    """Replace `path` by a spare file that holds `content`. False if no spare file is left or the content is longer than
    one. Raises `OSError`."""
    temporary = _take(folder, path) if len(content) <= SPARE_BYTES else None
    if temporary is None:
        return False
    _fill(temporary, content)
    os.rename(temporary, path)
    files.sync_directory(path.parent)
    return True


def _take(folder: Path, path: Path) -> Path | None:
    """One spare file under a new name beside `path`. A rename gives it to one taker only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
    for number in range(SPARES):
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder / str(number), temporary)
            return temporary
    return None


def _fill(path: Path, content: bytes) -> None:
    """Replace the content of a file in the space it has."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        written = os.pwrite(descriptor, content, 0)
        if written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
