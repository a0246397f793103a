"""Checks that a run can be resumed: by nobody else meanwhile, room on its disk, and an intact checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

from memconsole.runs.read.follow import Follower
from memconsole.runs.record import spares
from memconsole.runs.record.checkpoints import manifest, verified
from memconsole.runs.record.directory import RunDirectory, RunError, WriteError
from memconsole.runs.record.processes import locks

ROOM_BYTES = 1 << 20
"""What a new attempt writes before it trains: records, logs, the first events."""


@contextlib.contextmanager
def alone(run: RunDirectory) -> Iterator[None]:
    """Nobody else resumes the run meanwhile. Raises `RunError` if somebody does."""
    try:
        lock = locks.take(run.resume_lock, required=False)
    except locks.LockHeld:
        raise RunError(f"run {run.id} is starting; attach to it, or stop it first") from None
    except OSError as error:
        raise _cannot_be_written(run, error) from None
    try:
        yield
    finally:
        lock.release()


def check_room(run: RunDirectory) -> None:
    """Raise `RunError` if nothing can be written to the run's directory."""
    path = run.path / f".room-{secrets.token_hex(4)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            left = ROOM_BYTES
            while left > 0:
                left -= os.write(descriptor, bytes(min(left, 1 << 16)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _cannot_be_written(run, error) from None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _cannot_be_written(run: RunDirectory, error: OSError) -> WriteError:
    full = "; free some room there" if error.errno in spares.FULL else ""
    return WriteError(
        f"run {run.id} cannot be started: {run.path} cannot be written: {error.strerror}{full}"
    )


def check_checkpoint(run: RunDirectory) -> None:
    """Raise `RunError` if the run has saved checkpoints and none of them is intact.

    The trainer that is started next need not hash the intact one again.
    """
    problems = []
    for path in reversed(run.committed_checkpoints()):
        try:
            seen = verified.look(path)
            problem = manifest.verify(path)
        except OSError as error:
            problem = str(error.strerror)
        if problem is None:
            verified.note(run, seen)
            return
        problems.append(f"{path.name} is damaged ({problem})")
    if any(run.checkpoints_path.glob(f"{manifest.REPLACED}step-*")):
        return
    problems += [f"{path.name} is damaged" for path in manifest.damaged(run.checkpoints_path)]
    saved = Follower(run).poll().facts.checkpoint
    if saved is not None and not problems:
        problems.append(f"that of step {saved.step:,} is not there")
    if problems:
        raise RunError(
            f"run {run.id}: no intact checkpoint is left: {', '.join(problems)}; put an intact copy "
            f"back, or begin again at step 0: memconsole resume {run.id} --from-scratch"
        )


def set_damaged_aside(run: RunDirectory) -> None:
    """Make way for a run that begins again: its damaged checkpoints go to a folder of their own.

    Raises `RunError` if a checkpoint is intact, or if they cannot be moved.
    """
    try:
        check_checkpoint(run)
    except RunError:
        pass
    else:
        if run.committed_checkpoints():
            raise RunError(
                f"run {run.id} has an intact checkpoint; memconsole resume {run.id} continues from it, "
                f"and memconsole train --plan {run.plan_path} begins a new run"
            )
    folder = run.checkpoints_path / "damaged"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in (*run.committed_checkpoints(), *manifest.damaged(run.checkpoints_path)):
            path.rename(folder / f"{path.name}-{secrets.token_hex(3)}")
    except OSError as error:
        raise RunError(f"run {run.id}: {folder}: {error.strerror}") from None
