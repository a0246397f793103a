"""Runs that start after another run of this machine has ended: the wait, its end, and its cancellation."""

from __future__ import annotations

import contextlib
import time

import msgspec

from memconsole.plan.plan import Plan
from memconsole.plan.training.origin import checkpoint_of
from memconsole.runs.act import restart
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import files, spares
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.processes.identity import host_name
from memconsole.runs.record.records import WaitRecord

POLL_SECONDS = 0.5
"""How often a waiting supervisor looks at the run before it."""
LEAVING_SECONDS = 10.0
"""How long a supervisor whose wait was cancelled may take to leave."""


def check_after(plan: Plan, other: RunDirectory, run: RunDirectory | None = None) -> None:
    """Raise `RunError` if `plan`, the plan of `run` or of a new run, cannot start after `other`."""
    if plan.launch.on == "slurm" or other.job() is not None:
        raise RunError(
            "--after is for runs of this machine; for a job set launch.options = "
            '"--dependency=afterany:JOB", with the number of the job that goes first'
        )
    about = other.record()
    if about is not None and about.host != host_name():
        raise RunError(
            f"run {other.id} is of another machine, {about.host}: when it ends cannot be seen from here"
        )
    if run is not None and run in _chain(other):
        which = "itself" if other == run else f"run {other.id}, which starts after it"
        raise RunError(f"run {run.id} cannot start after {which}")
    source = checkpoint_of(plan)
    if source is None:
        return
    begun = RunDirectory(source.parent.parent)
    if begun != run and liveness(begun).live:
        raise RunError(
            f"run {begun.id} still trains and may have deleted its checkpoint {source.name} when this run "
            "starts: launch once it has ended"
        )


def wait_for(run: RunDirectory, other: RunDirectory) -> None:
    """Make the next attempt of `run` wait until `other` has ended. Raises `WriteError`."""
    record = WaitRecord(
        after=other.id,
        name=other.name,
        attempts_before=run.newest_attempt() or 0,
    )
    _write(run, record)


def stop_waiting(run: RunDirectory) -> None:
    """Forget what a run waited for. Raises `WriteError`."""
    try:
        run.waiting_path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{run.waiting_path}: cannot be removed: {error.strerror}") from None


def is_going(run: RunDirectory) -> bool:
    """Whether a run is live, or processes of it still hold memory."""
    now = liveness(run)
    return now.live or now.gang_held


def turn_comes(run: RunDirectory, record: WaitRecord) -> bool:
    """Wait until the runs before this one have ended, however they ended, and their processes are gone. False if the
    wait was cancelled. Raises `WriteError` if there is no room for the run then."""
    spares.keep(run.spares_path)
    first = RunDirectory(run.path.parent / record.after)
    while not is_cancelled(run):
        if not any(is_going(one) for one in _chain(first)):
            restart.check_room(run)
            return not is_cancelled(run)
        time.sleep(POLL_SECONDS)
    return False


def cancel(run: RunDirectory, record: WaitRecord, who: str) -> bool:
    """End a wait before the run's turn comes. False if the run has begun meanwhile. Raises `WriteError`, and `RunError` if
    its supervisor does not leave."""
    _write(run, msgspec.structs.replace(record, cancelled_by=who))
    deadline = time.monotonic() + LEAVING_SECONDS
    while liveness(run).supervisor_pid is not None:
        if run.waiting() is None:
            return False
        if time.monotonic() > deadline:
            raise RunError(f"run {run.id}: its supervisor does not reply, and may still start it")
        time.sleep(0.05)
    return run.waiting() is not None


def is_cancelled(run: RunDirectory) -> bool:
    """Whether somebody has cancelled the run's wait for another one."""
    record = run.waiting()
    return record is not None and bool(record.cancelled_by)


def record_trouble(run: RunDirectory, words: str) -> None:
    """Record why a run could not be started when its turn had come."""
    record = run.waiting()
    if record is not None:
        with contextlib.suppress(OSError):
            record = msgspec.structs.replace(record, trouble=words)
            spares.write_struct(run.spares_path, run.waiting_path, record)


def _chain(run: RunDirectory) -> list[RunDirectory]:
    """A run, and those that it waits for or was to wait for, each after the next one."""
    found = [run]
    while (record := found[-1].waiting()) is not None:
        before = RunDirectory(run.path.parent / record.after)
        if before in found:
            break
        found.append(before)
    return found


def _write(run: RunDirectory, record: WaitRecord) -> None:
    try:
        files.write_struct(run.waiting_path, record)
    except OSError as error:
        raise WriteError(f"{run.waiting_path}: cannot be written: {error.strerror}") from None
