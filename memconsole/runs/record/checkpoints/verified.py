"""A note for the next trainer: this checkpoint was hashed a moment ago and is intact.

Hashing takes seconds for a large model, so the trainer that is started then does not repeat it while
the files are the same: by name, size, times and inode, since the same start of the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes.identity import boot_id

_NAME = "verified.json"


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoint is intact, and how its files looked before they were hashed."""

    checkpoint: str
    boot_id: str
    stamps: dict[str, tuple[int, ...]]


def look(path: Path) -> Verified:
    """How the files of a checkpoint look. Raises `OSError`."""
    stamps: dict[str, tuple[int, ...]] = {}
    for entry in os.scandir(path):
        found = entry.stat(follow_symlinks=False)
        stamps[entry.name] = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return Verified(checkpoint=path.name, boot_id=boot_id(), stamps=stamps)


def note(run: RunDirectory, seen: Verified) -> None:
    """Leave the note for the next trainer. If it cannot be written, that trainer hashes again."""
    with contextlib.suppress(OSError):
        files.write_struct(run.control_path / _NAME, seen)


def take(run: RunDirectory) -> Callable[[Path], bool]:
    """Delete the note. Returns a function that says whether a checkpoint is the one of the note, and unchanged."""
    path = run.control_path / _NAME
    noted = files.read_struct(path, Verified)
    with contextlib.suppress(OSError):
        path.unlink()

    def unchanged(checkpoint: Path) -> bool:
        try:
            return noted is not None and look(checkpoint) == noted
        except OSError:
            return False

    return unchanged
