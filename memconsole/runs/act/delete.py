"""Deletes a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from memconsole.plan.plan import PlanError
from memconsole.plan.training.origin import checkpoint_of
from memconsole.runs.act.family import wake
from memconsole.runs.act.trackers import end_trackers
from memconsole.runs.read.life.liveness import liveness, settled
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes import locks
from memconsole.runs.record.run_store import list_runs


class Begun:
    """Which runs started from which. Reads the plan of each run once."""

    def __init__(self) -> None:
        self._sources: dict[RunDirectory, tuple[Path, ...]] = {}
        """The checkpoint that a run started from, as the folders that hold it."""

    def of(self, run: RunDirectory) -> list[RunDirectory]:
        """The runs that started from a checkpoint of this one. They read it again when they are resumed,
        and adapters also when they are sampled or exported."""
        runs, folder = list_runs(), run.path.resolve()
        for other in runs:
            if other not in self._sources:
                self._sources[other] = _source(other)
        return [other for other in runs if other != run and folder in self._sources[other]]


def _source(run: RunDirectory) -> tuple[Path, ...]:
    try:
        checkpoint = checkpoint_of(run.read_given_plan())
    except PlanError:
        return ()
    return () if checkpoint is None else tuple(checkpoint.resolve().parents)


def check_deletable(run: RunDirectory, begun: Begun) -> None:
    """Raise `RunError` while a process of the run is alive, or of one that started from it."""
    wake(run)
    now = settled(run)
    if now.live:
        raise RunError(f"run {run.id} is {now.state}; stop it first")
    if now.gang_held:
        raise RunError(
            f"run {run.id} is {now.state}; memconsole stop {run.id} --kill ends its children first"
        )
    if locks.holder(run.resume_lock) is not None:
        raise RunError(f"run {run.id} is starting; stop it first")
    for other in begun.of(run):
        now = liveness(other)
        if now.live:
            what = "is queued" if now.state == "queued" else "is training"
            raise RunError(f"run {run.id}: run {other.id} started from its weights and {what}")


def delete_run(run: RunDirectory, begun: Begun | None = None) -> None:
    """Remove a run's files, and what earlier deletions left. Raises what `check_deletable` raises, and `RunError` if the
    run or some of its files cannot be removed."""
    check_deletable(run, begun or Begun())
    trash = run.path.with_name(f".trash-{run.id}")
    try:
        lock = locks.take(run.supervisor_lock)
        try:
            end_trackers(run)
            os.rename(run.path, trash)
        finally:
            lock.release()
    except locks.LockHeld as error:
        raise RunError(f"run {run.id}: {error}") from None
    except FileNotFoundError:
        raise RunError(f"run {run.id} has been deleted already") from None
    except OSError as error:
        raise RunError(f"run {run.id}: cannot be deleted: {error.strerror}") from None
    for left in trash.parent.glob(".trash-*"):
        shutil.rmtree(left, ignore_errors=True)
    if os.path.lexists(trash):
        raise RunError(f"run {run.id}: deleted, but these files remain: {trash}")
