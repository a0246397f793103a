"""Reads and writes small files: written atomically by rename, read without following links."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from memconsole import regular_file, typed_json

SMALL_FILE_BYTES = 1 << 20
"""No JSON file of a run directory is larger; a larger one was not written by this program."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def write_atomic(path: Path, content: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Replace `path` by `content`; after a power loss the file is the old or the new one.

    A temporary file in the same folder is created exclusively, synced and renamed, then the folder
    is synced. Without `durable` nothing is synced, so a power loss may lose the file; use that for
    what can be computed again. Raises `OSError`, which names `path`. The temporary file is always removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
        try:
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view) :]
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power loss, where the file system offers that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_struct(path: Path, record: msgspec.Struct) -> None:
    """`write_atomic` of a struct as JSON."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_regular(path: Path, limit: int = SMALL_FILE_BYTES) -> bytes | None:
    """The bytes of a regular file of at most `limit` bytes; None for anything else.

    Links are not followed and a FIFO does not block.
    """
    try:
        return regular_file.read(path, limit, follow=False)
    except OSError:
        return None


def read_struct(path: Path, kind: type[_Struct]) -> _Struct | None:
    """A struct from its JSON file; None if missing or damaged. A damaged file is read twice."""
    for _ in range(2):
        content = read_regular(path)
        if content is None:
            return None
        try:
            return typed_json.decode(content, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return None


def exists(path: Path) -> bool:
    """Whether a directory entry of any type exists."""
    try:
        path.lstat()
    except OSError:
        return False
    return True
