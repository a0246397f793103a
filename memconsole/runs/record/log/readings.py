"""The readings of a run's processes: each process but the first writes its own into a small file, and the
first one reads them.

So no process waits for another one to measure, and the last reading of a process that died is kept.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from memconsole.runs.record import files
from memconsole.runs.record.log.events import RankReading

FOLDER = "processes"


class _Told(msgspec.Struct, frozen=True):
    """The content of a file: the readings of a process, one for each of its devices that it can tell apart."""

    ranks: tuple[RankReading, ...]


def tell(attempt_directory: Path, process: int, readings: tuple[RankReading, ...]) -> None:
    """Replace the file of `process`. Nothing is synced; a full disk loses the reading alone."""
    with contextlib.suppress(OSError):
        content = msgspec.json.encode(_Told(readings))
        files.write_atomic(_path(attempt_directory, process), content, durable=False)


def told(attempt_directory: Path, processes: int) -> tuple[RankReading, ...]:
    """The newest readings of the processes 1, 2 …; those without a readable file are left out."""
    found = (
        files.read_struct(_path(attempt_directory, process), _Told)
        for process in range(1, processes)
    )
    return tuple(reading for one in found if one is not None for reading in one.ranks)


def _path(attempt_directory: Path, process: int) -> Path:
    return attempt_directory / FOLDER / f"reading-{process}.json"
