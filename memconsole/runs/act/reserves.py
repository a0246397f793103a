"""Frees the disk space that killed runs reserved for their last records."""

from __future__ import annotations

import contextlib
import shutil

from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import locks
from memconsole.runs.record.processes.identity import host_name
from memconsole.runs.record.run_store import list_runs


def free_reserves() -> None:
    """Remove the reserves of runs of this machine that have ended. A run removes its own, unless it was killed
    together with its supervisor. Raises `RunError`."""
    for run in list_runs():
        left = files.exists(run.reserve_path) or files.exists(run.spares_path)
        if left and _of_this_machine(run) and not _lives(run):
            with contextlib.suppress(OSError):
                run.reserve_path.unlink()
            shutil.rmtree(run.spares_path, ignore_errors=True)


def _of_this_machine(run: RunDirectory) -> bool:
    """Locks of processes on another machine may not be visible here."""
    number = run.newest_attempt()
    attempt = None if number is None else run.attempt_record(number)
    return run.job() is None and attempt is not None and attempt.supervisor.host == host_name()


def _lives(run: RunDirectory) -> bool:
    held = locks.held(run.path)
    supervised = held.supervisor is not None or locks.holder(run.resume_lock) is not None
    return supervised or held.trainer is not None or held.gang or liveness(run).live
