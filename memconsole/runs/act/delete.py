"""Deletes a run."""

from __future__ import annotations

import contextlib
import os
import shutil

from memconsole.runs.act.family import wake
from memconsole.runs.read.liveness import settled
from memconsole.runs.record import locks
from memconsole.runs.record.directory import RunDirectory, RunError


def delete_run(run: RunDirectory) -> None:
    """Remove a run's files. Raises `RunError` while any of its processes is alive."""
    wake(run)
    now = settled(run)
    if now.live or now.gang_held:
        raise RunError(f"run {run.id} is {now.state}; stop it first")
    try:
        lock = locks.take(run.supervisor_lock)
    except locks.LockHeld as error:
        raise RunError(f"run {run.id}: {error}") from None
    try:
        trash = run.path.with_name(f".trash-{run.id}")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(trash)
        os.rename(run.path, trash)
        shutil.rmtree(trash)
    except OSError as error:
        raise RunError(f"run {run.id}: cannot be deleted: {error.strerror}") from None
    finally:
        lock.release()
