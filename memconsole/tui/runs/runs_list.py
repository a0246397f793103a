"""Lists every run as one line, live ones first; a run that cannot be read becomes a note."""

from __future__ import annotations

from memconsole.runs.read.follow import RunStatus, status
from memconsole.runs.record.directory import RunError, list_runs
from memconsole.runs.record.states import LIVE

__all__ = ["RunStatus", "list_statuses", "newest_live"]
MOST = 500
"""How many runs are listed; older ones stay on disk."""


def list_statuses(most: int = MOST) -> tuple[tuple[RunStatus, ...], tuple[str, ...]]:
    """The runs of this user, live first, then newest first, and notes on unreadable ones."""
    try:
        runs = list_runs()
    except (RunError, OSError) as error:
        return (), (str(error),)
    found: list[RunStatus] = []
    notes: list[str] = []
    for run in runs[:most]:
        try:
            found.append(status(run))
        except (RunError, OSError) as error:
            notes.append(f"{run.id}: {error}")
    found.sort(key=lambda one: one.state not in LIVE)
    if len(runs) > most:
        notes.append(f"{len(runs) - most} older runs are not shown")
    return tuple(found), tuple(notes)


def newest_live() -> RunStatus | None:
    """The newest live run among the newest 30."""
    runs, _ = list_statuses(30)
    return next((run for run in runs if run.state in LIVE), None)
