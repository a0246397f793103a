"""Opens files by name: regular ones only, without waiting, and reads a bounded number of bytes.

A name that a person or a run's folder gives may belong to anything. Opening a named pipe waits for
its other end, and reading a device may never end. So every such file is opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MIB = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link"),
)


class NotRegularError(OSError):
    """What the name belongs to is not a file with content: `strerror` says what it is."""


class TooLargeError(OSError):
    """The file is larger than the caller allows: `strerror` says how large it may be."""


def open_descriptor(path: Path, *, follow: bool = True) -> int:
    """A read-only descriptor of a regular file. Without `follow`, a link is refused.

    Raises `OSError`, also for a name that no file can have.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        # Opening some devices has an effect, so look before opening, and again at what was opened.
        _check(path, os.stat(path, follow_symlinks=follow))
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except ValueError:
        raise NotRegularError(errno.EINVAL, "not a file name", str(path)) from None
    try:
        _check(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """`open_descriptor` as a binary file."""
    return os.fdopen(open_descriptor(path, follow=follow), "rb")


def check_regular(path: Path) -> None:
    """Raise `OSError` unless `path` can be opened as a regular file.

    For libraries that open files by themselves.
    """
    os.close(open_descriptor(path))


def read(path: Path, limit: int, *, follow: bool = True) -> bytes:
    """All bytes of a regular file. Raises `TooLargeError` beyond `limit` bytes, and `OSError`."""
    descriptor = open_descriptor(path, follow=follow)
    try:
        pieces: list[bytes] = []
        # Systems report no size for files that they make up as they are read.
        left = limit + 1 if os.fstat(descriptor).st_size <= limit else 0
        while left:
            piece = os.read(descriptor, min(left, MIB))
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(descriptor)
    raise TooLargeError(errno.EFBIG, f"larger than {_size(limit)}", str(path))


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((word for is_kind, word in _KINDS if is_kind(status.st_mode)), "no file")
        raise NotRegularError(errno.EINVAL, f"{kind}, not a file", str(path))


def _size(limit: int) -> str:
    return f"{limit // MIB:,} MiB" if limit >= MIB else f"{limit:,} bytes"
