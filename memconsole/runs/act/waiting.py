"""Runs that start after another run of this machine has ended: the wait, its end, and its cancellation."""

from __future__ import annotations

import time

import msgspec

from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.records import WaitRecord

POLL_SECONDS = 1.0
"""How often a waiting supervisor looks at the run before it."""
LEAVING_SECONDS = 10.0
"""How long a supervisor whose wait was cancelled may take to leave."""


def wait_for(run: RunDirectory, other: RunDirectory) -> None:
    """Make the next attempt of `run` wait until `other` has ended. Raises `RunError` if `other` waits for `run`."""
    first: RunDirectory | None = other
    while first is not None:
        if first == run:
            which = "itself" if other == run else f"run {other.id}, which starts after it"
            raise RunError(f"run {run.id} cannot start after {which}")
        first = _before(first)
    record = WaitRecord(
        after=other.id,
        name=other.name,
        attempts_before=run.newest_attempt() or 0,
        since_wall=time.time(),
    )
    _write(run, record)


def stop_waiting(run: RunDirectory) -> None:
    """Forget what a run waited for. Raises `WriteError`."""
    try:
        run.waiting_path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{run.waiting_path}: cannot be removed: {error.strerror}") from None


def turn_comes(run: RunDirectory) -> bool:
    """Wait until the run before this one has ended, however it ended, and its processes are gone. False if the wait was
    cancelled."""
    while (record := run.waiting()) is not None and not record.cancelled_by:
        first = liveness(RunDirectory(run.path.parent / record.after))
        if not first.live and not first.gang_held:
            return True
        time.sleep(POLL_SECONDS)
    return record is None


def cancel(run: RunDirectory, record: WaitRecord, who: str) -> bool:
    """End a wait before the run's turn comes. False if the run has begun meanwhile. Raises `WriteError`."""
    _write(run, msgspec.structs.replace(record, cancelled_by=who))
    deadline = time.monotonic() + LEAVING_SECONDS
    while liveness(run).supervisor_pid is not None and time.monotonic() < deadline:
        if run.waiting() is None:
            return False
        time.sleep(0.05)
    return run.waiting() is not None


def record_trouble(run: RunDirectory, words: str) -> None:
    """Record why a run could not be started when its turn had come. Raises `WriteError`."""
    record = run.waiting()
    if record is not None:
        _write(run, msgspec.structs.replace(record, trouble=words))


def _before(run: RunDirectory) -> RunDirectory | None:
    """The run that `run` waits for."""
    record = run.waiting()
    if record is None or record.cancelled_by:
        return None
    return RunDirectory(run.path.parent / record.after)


def _write(run: RunDirectory, record: WaitRecord) -> None:
    try:
        files.write_struct(run.waiting_path, record)
    except OSError as error:
        raise WriteError(f"{run.waiting_path}: cannot be written: {error.strerror}") from None
