"""Starts and ends the processes that send a run's figures to experiment trackers.

Such a process reads the run's event log, as a console does. It is no child of the trainer and shares
no pipe or lock with it, so a tracker that hangs or fails cannot hold up training.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from memconsole.plan.machine.trackers import KINDS, Kind, wanted
from memconsole.plan.plan import PlanError
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import locks
from memconsole.runs.record.trackers import FOLDER, lock_path

START_SECONDS = 20.0


def start_trackers(run: RunDirectory) -> tuple[Kind, ...]:
    """Start a process for each tracker that the run's plan names; returns which. Never raises."""
    try:
        kinds = wanted(run.read_plan())
    except PlanError:
        return ()
    for kind in kinds:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            (run.path / FOLDER).mkdir(mode=0o700, exist_ok=True)
            # -P: a file in the current folder must not shadow a module. It detaches itself.
            command = [sys.executable, "-P", "-m", "memconsole_trainer.trackers"]
            started = subprocess.Popen(
                [*command, str(run.path), kind],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            started.wait(START_SECONDS)
    return kinds


def end_trackers(run: RunDirectory) -> None:
    """End the processes that still send figures of this run."""
    for kind in KINDS:
        process = locks.holder(lock_path(run.path, kind))
        if process:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
