"""Lists every run as one line, live ones first; a run that cannot be read becomes a note."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from memconsole.runs.read.follow import status
from memconsole.runs.read.life.liveness import Liveness, liveness
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.record import labels
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.run_store import list_runs
from memconsole.runs.record.states import LIVE

MOST = 500
"""How many runs are listed; older ones stay on disk."""

Times = tuple[tuple[int, int, int] | None, ...]
"""When each file of a run was written, its size and its inode; None if it is not there."""


class RunList(NamedTuple):
    """The runs of this user."""

    runs: tuple[RunStatus, ...] = ()
    """Live first, then newest first."""
    total: int = 0
    """How many there are; not all are listed if there are very many or if some cannot be read."""
    notes: tuple[str, ...] = ()
    """Why runs cannot be read."""


class _Kept(NamedTuple):
    """The status of an ended run, with what it was read from."""

    life: Liveness
    times: Times
    status: RunStatus


class _Reader:
    """Lists the runs. An ended run that has not changed since the last listing is not read again."""

    def __init__(self) -> None:
        self._kept: dict[RunDirectory, _Kept] = {}

    def list_statuses(self, most: int = MOST) -> RunList:
        """The runs of this user."""
        try:
            runs = list_runs()
        except (RunError, OSError) as error:
            return RunList(notes=(str(error),))
        lives = {run: liveness(run) for run in runs}
        kept: dict[RunDirectory, _Kept] = {}
        statuses: list[RunStatus] = []
        notes: list[str] = []
        for run in sorted(runs, key=lambda run: not lives[run].live)[:most]:
            # The times before the content: a change in between is seen next time.
            times, known = _times(run), self._kept.get(run)
            try:
                if known is None or known[:2] != (lives[run], times):
                    known = _Kept(lives[run], times, status(run))
            except (RunError, OSError) as error:
                notes.append(f"{run.id}: {error}")
                continue
            statuses.append(known.status)
            if known.status.state not in LIVE:
                kept[run] = known
        self._kept = kept
        statuses.sort(key=lambda status: status.state not in LIVE)
        return RunList(tuple(statuses), len(runs), tuple(notes))


list_statuses = _Reader().list_statuses


def _times(run: RunDirectory) -> Times:
    attempt = run.newest_attempt()
    return tuple(
        _time(path)
        for path in (
            run.record_path,
            run.plan_path,
            run.path / labels.FILE,
            run.state_path,
            run.attempts_path if attempt is None else run.attempt_path(attempt),
        )
    )


def _time(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
