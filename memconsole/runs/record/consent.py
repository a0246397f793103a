"""Consent of the user to continue a run although its data have changed.

It is a file that the next attempt finds. It lasts until that run's next checkpoint, which belongs to
the changed data.
"""

from __future__ import annotations

import time

import msgspec

from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory

_NAME = "changed-data.json"


class Consent(msgspec.Struct, frozen=True, kw_only=True):
    """Who agreed, and when."""

    who: str
    time_wall: float


def agree(run: RunDirectory, who: str) -> None:
    """Record that `who` agrees to continue `run` with changed data. Raises `OSError`."""
    record = Consent(who=who, time_wall=time.time())
    files.write_struct(run.control_path / _NAME, record)


def agreed(run: RunDirectory) -> Consent | None:
    """The consent that is in force."""
    return files.read_struct(run.control_path / _NAME, Consent)


def end(run: RunDirectory) -> None:
    """The consent was used. Raises `OSError`."""
    (run.control_path / _NAME).unlink(missing_ok=True)
