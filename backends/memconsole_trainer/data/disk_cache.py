"""The disk cache of everything that is made from data, such as tokens. Each entry has a folder of its own, which one
process at a time may write."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from memconsole.private_files import private_folder
from memconsole.user_folders import cache_folder

LOCK = "lock"
SPARED_BYTES = 1 << 30
"""Free bytes that are left on the disk for everything else, such as checkpoints."""
FLAGS = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def root() -> Path:
    """The folder of the whole cache."""
    return cache_folder() / "data"


def key(*parts: object) -> str:
    """The name of the folder of the entry that is made from `parts`."""
    return hashlib.sha256(repr(parts).encode("utf-8", "replace")).hexdigest()[:32]


def lock(folder: Path, *, shared: bool = False) -> int | None:
    """Make `folder` and lock it until the descriptor is closed or the process ends.

    With `shared` the lock only prevents deletion. Returns None if another process has the lock.
    Raises `OSError` if the folder cannot be written.
    """
    private_folder(folder)
    descriptor = os.open(folder / LOCK, os.O_RDWR | FLAGS, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    with contextlib.suppress(OSError):
        os.utime(folder)  # the last use, by which the oldest is found
    return descriptor


class _Kept(NamedTuple):
    used: float
    bytes: int
    folder: Path


def others(folder: Path) -> int:
    """Bytes that the folders beside `folder` take."""
    return sum(kept.bytes for kept in _beside(folder))


def make_room(folder: Path, wanted: int) -> int:
    """Delete folders beside `folder` that no process uses, the least recently used first, until
    `wanted` bytes are freed. Returns the number of freed bytes."""
    freed = 0
    for kept in sorted(_beside(folder)):
        if freed >= wanted:
            break
        with contextlib.suppress(OSError):
            held = lock(kept.folder)
            if held is not None:
                shutil.rmtree(kept.folder)
                os.close(held)
                freed += kept.bytes
    return freed


def free_bytes(folder: Path) -> int:
    """Bytes that can be written on the disk of `folder` and leave `SPARED_BYTES`. Raises
    `OSError`."""
    return shutil.disk_usage(folder).free - SPARED_BYTES


def _beside(folder: Path) -> list[_Kept]:
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder.parent):
            if entry.name == folder.name or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                size = sum(f.stat(follow_symlinks=False).st_size for f in os.scandir(entry.path))
                used = entry.stat(follow_symlinks=False).st_mtime
                found.append(_Kept(used, size, Path(entry.path)))
    return found
