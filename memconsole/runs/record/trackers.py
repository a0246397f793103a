"""The files in a run's directory of the process that sends its figures to an experiment tracker."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memconsole.plan.machine.trackers import KINDS, NAMES, Kind
from memconsole.runs.record import files
from memconsole.sanitize import clean_line

FOLDER = "trackers"
"""Folder within the run directory."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `trackers/KIND.json`: how far the figures were sent."""

    tracked: str = ""
    """The tracker's own id of the run; it stays the same until an attempt begins again at step 0."""
    training: int = 1
    """1, and one more each time an attempt began again at step 0. Each number is a run of its own in the tracker."""
    where: str = ""
    """Where a user finds the run: an address or a folder."""
    attempt: int = 0
    position: tuple[int, int, int] = (0, 0, 0)
    """The position in the attempt's event log, as `EventReader` gives it."""
    last: dict[str, int] = {}
    """The newest step of each figure that was sent."""
    problem: str = ""
    """Why figures could not be sent; empty once they were."""


def state_path(run: Path, kind: Kind) -> Path:
    return run / FOLDER / f"{kind}.json"


def lock_path(run: Path, kind: Kind) -> Path:
    return run / FOLDER / f"{kind}.lock"


def read_sent(run: Path, kind: Kind) -> Sent:
    """How far the figures of the run in the folder `run` were sent; nothing if the file is damaged."""
    return files.read_struct(state_path(run, kind), Sent) or Sent()


def tracked_at(run: Path) -> tuple[tuple[str, str], ...]:
    """The trackers that show the run: name, and address or command."""
    if not files.exists(run / FOLDER):
        return ()
    found = ((NAMES[kind], read_sent(run, kind).where) for kind in KINDS)
    return tuple((name, clean_line(where, 500)) for name, where in found if where)


def tracker_problems(run: Path) -> tuple[str, ...]:
    """One sentence for each tracker that figures cannot be sent to."""
    if not files.exists(run / FOLDER):
        return ()
    found = ((kind, read_sent(run, kind).problem) for kind in KINDS)
    return tuple(
        clean_line(
            f"{NAMES[kind]}: {problem}; the run goes on, and its figures are sent later", 500
        )
        for kind, problem in found
        if problem
    )
