"""Finds the run that a command without a name is about."""

from __future__ import annotations

from memconsole.runs.read.life.liveness import Liveness, liveness
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.requests import pause_asked
from memconsole.runs.record.run_store import LATEST, find_run, list_runs


def newest_live() -> RunDirectory | None:
    """The newest run that is live, a queued one only if all of them are queued; None if none is live. Raises `RunError`."""
    queued = None
    for run in list_runs():
        now = liveness(run)
        if _goes(now):
            return run
        if now.live:
            queued = queued or run
    return queued


def find_live(reference: str | None) -> RunDirectory:
    """`find_run`; without a reference the newest live run, or else the newest of all. Raises `RunError`."""
    if reference is not None:
        return find_run(reference)
    return newest_live() or find_run(LATEST)


def find_paused(reference: str | None) -> RunDirectory:
    """`find_run`; without a reference the newest live run that is paused, or else the newest of all. Raises
    `RunError`."""
    if reference is not None:
        return find_run(reference)
    asked = (run for run in list_runs() if pause_asked(run))
    return next((run for run in asked if _goes(liveness(run))), None) or find_run(LATEST)


def _goes(now: Liveness) -> bool:
    """Whether a run is live and does not wait in a queue."""
    return now.live and now.state != "queued"
