"""Choices that the console keeps on disk: colours, and whether it receives mouse clicks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memconsole.runs.record import files
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.run_store import make_runs_root, runs_root

NAME = "console.json"


class Remembered(msgspec.Struct, frozen=True):
    """A person's choices; None: nothing was chosen."""

    theme: str | None = None
    mouse: bool | None = None


def remembered() -> Remembered:
    """The stored choices; none if the file is missing or damaged."""
    try:
        path = _path(runs_root())
    except RunError:
        return Remembered()
    return files.read_struct(path, Remembered) or Remembered()


def remember(**changes: object) -> str:
    """Store choices, keeping the others. Returns why that failed; empty if it did not."""
    try:
        path = _path(make_runs_root())
        kept = msgspec.structs.replace(remembered(), **changes)
        files.write_atomic(path, msgspec.json.encode(kept), durable=False)
    except (OSError, RunError) as error:
        return str(error)
    return ""


def _path(runs: Path) -> Path:
    return runs.parent / NAME
