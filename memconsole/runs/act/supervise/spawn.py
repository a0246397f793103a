"""Starts a trainer with its output in a file and no inherited descriptors, and records it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from memconsole.runs.act.environment import trainer_environment
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures import oom
from memconsole.runs.record.processes import identity
from memconsole.runs.record.records import OUTPUT, AttemptRecord, Identity, JobPlace

OOM_SCORE = 500
"""The kernel should kill the trainer before consoles, supervisors and login shells."""

TrainerCommand = Callable[[RunDirectory, int], Sequence[str]]


def trainer_command(run: RunDirectory, attempt: int) -> list[str]:
    """The command of the trainer. -P: a file in the current folder must not shadow a module."""
    return [sys.executable, "-P", "-m", "memconsole_trainer", str(run.path), str(attempt)]


def start_trainer(
    run: RunDirectory, attempt: int, argv: Sequence[str], place: JobPlace | None = None
) -> tuple[int, Identity | None]:
    """Start `argv` as the trainer of an attempt and write `attempt.json`.

    In a job it stays in the job's session, by which Slurm may know the job's processes.

    Returns its process id, to wait for with `os.waitpid`, and its identity (None if it is dead
    already). Raises `OSError` and `PlanError`.
    """
    path = run.attempt_path(attempt)
    record = AttemptRecord(
        attempt=attempt,
        supervisor=identity.identify(os.getpid()) or _unseen(os.getpid()),
        started_wall=time.time(),
        argv=tuple(argv),
        oom_kills=oom.oom_kills(),
        job=place,
    )
    files.write_struct(path / "attempt.json", record)
    about = run.record()
    directory = about.directory if about and os.path.isdir(about.directory) else run.path
    environment = trainer_environment(run.read_plan(), os.environ, run.id, attempt)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    output = os.open(path / OUTPUT, flags, 0o600)
    try:
        process = subprocess.Popen(
            list(argv),
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            close_fds=True,
            start_new_session=place is None,
            umask=0o077,
        )
    finally:
        os.close(output)
    # The supervisor waits for it together with adopted orphans.
    process.returncode = 0
    who = identity.identify(process.pid)
    if who is not None:
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(OOM_SCORE))
        with contextlib.suppress(OSError):
            files.write_struct(path / "attempt.json", msgspec.structs.replace(record, trainer=who))
    return process.pid, who


def _unseen(pid: int) -> Identity:
    return Identity(pid=pid, start_ticks=0, boot_id=identity.boot_id(), host=identity.host_name())
