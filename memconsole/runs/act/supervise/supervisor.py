"""The small process that starts a run's trainer and stays with it.

``python -m memconsole.runs.act.supervise.supervisor RUN_DIRECTORY [--start | --resume | --adopt]``. It
imports no framework and no screen. It survives the terminal that started it, and training survives
it: if it is killed, another supervisor adopts the trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from memconsole.plan.plan import PlanError
from memconsole.runs.act.supervise import daemon
from memconsole.runs.act.supervise.spawn import TrainerCommand, trainer_command
from memconsole.runs.act.supervise.supervision import Supervisor, say
from memconsole.runs.act.waiting import is_cancelled, record_trouble, turn_comes
from memconsole.runs.read.life.liveness import settled
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import StartRecord, WaitRecord

AnySupervisor = TypeVar("AnySupervisor", bound=Supervisor)


def main(arguments: Sequence[str] | None = None, command: TrainerCommand = trainer_command) -> int:
    """Detach, take the lock, start or adopt the trainer, report through --ready-fd, and watch."""
    parser = argparse.ArgumentParser(prog="memconsole.runs.act.supervise.supervisor")
    parser.add_argument("run", type=Path)
    parser.add_argument("--ready-fd", type=int, default=-1)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--start", dest="mode", action="store_const", const="start", default="start")
    mode.add_argument("--resume", dest="mode", action="store_const", const="start")
    mode.add_argument("--adopt", dest="mode", action="store_const", const="adopt")
    options = parser.parse_args(arguments)
    run = RunDirectory(options.run.resolve(strict=True))
    os.chdir("/")
    daemon.detach(run.path / "supervisor.log", options.ready_fd)
    daemon.outlive_signals()
    daemon.adopt_descendants()
    supervisor = None
    try:
        supervisor = _sole_supervisor(run)
        waiting = run.waiting() if options.mode == "start" else None
        if waiting is not None:
            attempt = waiting.attempts_before + 1
        else:
            attempt = supervisor.adopt() if options.mode == "adopt" else supervisor.start(command)
    except (RunError, locks.LockHeld, OSError, ValueError) as error:
        words = _words(run, error)
        say(words)
        _tell(options.ready_fd, StartRecord(error=words))
        return 1
    _tell(options.ready_fd, StartRecord(attempt=attempt))
    if waiting is None or _starts_in_turn(supervisor, waiting, command):
        supervisor = watch_to_the_end(supervisor, command)
    supervisor.close()
    if not is_cancelled(run):
        announce(run)
    return 0


def announce(run: RunDirectory) -> None:
    """Start the user's program for the end of a run. The supervisor's lock must be free, so that the program can resume
    or delete the run."""
    # Imported here: to start a trainer, a supervisor need not read events.
    from memconsole.runs.act.supervise.on_end import tell_end

    try:
        trouble = tell_end(run)
    except (RunError, OSError, PlanError) as error:
        trouble = str(error)
    if trouble:
        say(trouble)


def _starts_in_turn(supervisor: Supervisor, wait: WaitRecord, command: TrainerCommand) -> bool:
    """Start the attempt once the run before it has ended. False if the wait was cancelled, or it cannot be started."""
    try:
        if not turn_comes(supervisor.run, wait):
            return False
        supervisor.start(command)
    except (RunError, OSError, ValueError) as error:
        words = _words(supervisor.run, error)
        say(words)
        record_trouble(supervisor.run, words)
        return False
    return True


def _sole_supervisor(run: RunDirectory) -> Supervisor:
    """A new supervisor, once that of an ended attempt is gone. Raises `RunError` if the run lives."""
    try:
        return Supervisor(run)
    except locks.NoLocks:
        raise
    except locks.LockHeld:
        now = settled(run)
        if now.live:
            words = f"run {run.id} is {now.state}; attach to it, or stop it first"
            raise RunError(words) from None
    return Supervisor(run)


def _words(run: RunDirectory, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"run {run.id} cannot be started: {error.filename}: {error.strerror}"
    return str(error)


def watch_to_the_end(supervisor: AnySupervisor, command: TrainerCommand) -> AnySupervisor:
    """Watch an attempt, and those by which the run goes on by itself: with less memory, or after it lost a
    process. Returns the last one's supervisor."""
    supervisor.watch()
    while supervisor.continues:
        supervisor = supervisor.successor()
        try:
            supervisor.start(command)
        except (RunError, OSError, ValueError) as error:
            say(str(error))
            break
        supervisor.watch()
    return supervisor


def _tell(descriptor: int, message: StartRecord) -> None:
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.write(descriptor, msgspec.json.encode(message))
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
