"""Records which of an attempt's processes ended first, by a signal, for readers of an attempt that has no supervisor."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import msgspec

from memconsole.runs.record import files

FILE = "failed.json"
"""In the folder of the attempt's processes."""


class FailedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process whose end made the others fail, and the number of the signal that ended it."""

    rank: int
    signal: int


def keep(folder: Path, rank: int, exit_code: int) -> None:
    """Record a process if a signal ended it: `exit_code` is negative. One that failed by itself has recorded why."""
    if exit_code < 0:
        with contextlib.suppress(OSError):
            files.write_struct(folder / FILE, FailedProcess(rank=rank, signal=-exit_code))


def kept(folder: Path) -> FailedProcess | None:
    """What was recorded; None if nothing was, or no signal of this system."""
    found = files.read_struct(folder / FILE, FailedProcess)
    return found if found is not None and found.signal in set(signal.Signals) else None
