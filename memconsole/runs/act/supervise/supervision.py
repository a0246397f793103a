"""Watches one attempt of a run: serves requests and records how the attempt ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from memconsole.plan.plan import PlanError
from memconsole.runs.act import family
from memconsole.runs.act.supervise import again, daemon, spawn
from memconsole.runs.act.supervise.serving import Serving
from memconsole.runs.act.supervise.spawn import TrainerCommand, trainer_command
from memconsole.runs.read.life import ladder
from memconsole.runs.read.life.verdict import classify, gather
from memconsole.runs.record import files, requests, spares
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.failures.failure import cause_of
from memconsole.runs.record.processes import identity, locks
from memconsole.runs.record.processes.heartbeat import read_heartbeat
from memconsole.runs.record.processes.identity import ProcessHandle, boot_seconds
from memconsole.runs.record.records import (
    ERROR,
    EXIT,
    OUTPUT,
    PAUSED,
    ErrorRecord,
    ExitRecord,
    JobPlace,
)
from memconsole.runs.record.states import Verdict

POLL_SECONDS = 0.25
SNAPSHOT_SECONDS = 1.0
EXIT_TRIES = 60
"""Tries, one second apart, to record the end of an attempt if writing fails although the disk has room."""
LOG_BYTES = 64 << 20
"""Disk space for an attempt's output. Beyond it only the end of the output is kept."""


class Supervisor:
    """Watches one attempt of one run. Holds `supervisor.lock` from construction to `close()`."""

    def __init__(
        self,
        run: RunDirectory,
        poll_seconds: float = POLL_SECONDS,
        lock: locks.Lock | None = None,
    ) -> None:
        """Takes the supervisor's lock, unless `lock` is given.

        Raises `locks.LockHeld` if the run has another supervisor.
        """
        self.run = run
        self.poll_seconds = poll_seconds
        self.lock = lock or locks.take(run.supervisor_lock)
        self.attempt = 0
        self.child: int | None = None
        """The trainer's process id, if it is a child of this process."""
        self.status: int | None = None
        """The trainer's wait status."""
        self.handle: ProcessHandle | None = None
        self.serving = Serving(run, say)
        self.killing = False
        self.continues = False
        """Whether the run goes on by itself: with smaller micro-batches, or after it lost a process."""
        self.by_itself = False
        """Whether the attempt to start continues the run without a person's request."""
        self.place: JobPlace | None = None
        """The Slurm job that this process is part of."""
        self._save: Callable[[], object] | None = None
        self._next_snapshot = 0.0

    def successor(self) -> Self:
        """A supervisor for the next attempt, with this one's lock. Call once this attempt has
        ended.
        """
        if self.handle is not None:
            self.handle.close()
        following = type(self)(self.run, self.poll_seconds, self.lock)
        following.by_itself = True
        return following

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.lock.release()

    def start(self, command: TrainerCommand = trainer_command) -> int:
        """Create the next attempt and start its trainer. Returns the attempt's number.

        A paused run stays paused if it continues by itself. Raises `RunError` if processes of an older attempt are
        alive or the trainer cannot be started.
        """
        held = locks.held(self.run.path)
        if held.trainer is not None:
            raise RunError(f"run {self.run.id}: its trainer still runs (process {held.trainer})")
        if held.gang:
            raise RunError(f"run {self.run.id}: children of its last attempt still hold memory")
        spares.keep(self.run.spares_path)  # the disk may be full before the trainer has begun
        older = self.run.newest_attempt()
        if older is not None and not files.exists(self.run.attempt_path(older) / EXIT):
            self.attempt = older
            self._record_exit(None, None)
        paused = self.by_itself and requests.pause_asked(self.run)
        self.attempt = self.serving.attempt = self.run.new_attempt()
        try:
            if paused:
                self._pause(True)
            self._spawn(command(self.run, self.attempt))
        except (OSError, ValueError) as error:
            self._record_error(error)
            self._record_exit(127, None)
            raise RunError(f"run {self.run.id}: the trainer cannot be started: {error}") from None
        return self.attempt

    def adopt(self) -> int:
        """Take over the living trainer of the newest attempt, or record how it ended.

        Raises `RunError` if there is no attempt.
        """
        attempt = self.run.newest_attempt()
        if attempt is None:
            raise RunError(f"run {self.run.id} was never started")
        self.attempt = attempt
        record = self.run.attempt_record(attempt)
        holder = locks.holder(self.run.trainer_lock)
        who = identity.identify(holder) if holder else record.trainer if record else None
        if who is not None:
            with contextlib.suppress(ProcessLookupError):
                self.handle = ProcessHandle(who)
        self.serving.adopt(attempt, self.handle is not None)
        return attempt

    def watch(self) -> None:
        """Serve requests until the trainer and its children have ended and the end is recorded."""
        while not self._ended():
            self._tick()
        self._collect()
        if not files.exists(self.path / EXIT):
            self._record_exit(*self._exit_status())
        if self.killing or again.is_several(self.run):
            family.kill_members(self.run.id, os.getpid() if self.child else None)
        while locks.gang_held(self.run.gang_lock):
            self.serving.serve(self._act)
            if self.killing:
                family.kill_members(self.run.id, os.getpid() if self.child else None)
            self._collect()
            time.sleep(self.poll_seconds)
        with contextlib.suppress(OSError):
            self.run.reserve_path.unlink()
        shutil.rmtree(self.run.spares_path, ignore_errors=True)
        self._snapshot(final=True)
        self._receipt()

    @property
    def path(self) -> Path:
        return self.run.attempt_path(self.attempt)

    def _spawn(self, argv: Sequence[str]) -> None:
        self.child, who = spawn.start_trainer(self.run, self.attempt, argv, self.place)
        if who is not None:
            with contextlib.suppress(ProcessLookupError):
                self.handle = ProcessHandle(who)

    def _ended(self) -> bool:
        """Wait up to one poll interval for the trainer to end."""
        if self.status is not None:
            return True
        if self.handle is not None:
            return self.handle.wait(self.poll_seconds)
        if locks.holder(self.run.trainer_lock) is None:
            return True
        # The lock shows that it is alive, but its process is not visible from here.
        time.sleep(self.poll_seconds)
        return False

    def _tick(self) -> None:
        self._collect()
        self.serving.serve(self._act)
        if self.serving.stops:
            family.wake_members(self.run.id, os.getpid() if self.child else None)
        if self.serving.overdue(read_heartbeat(self.path)) and not self.killing:
            self.serving.record_kill()
            self._kill()
        self._snapshot()
        daemon.punch_head(self.path / OUTPUT, LOG_BYTES)

    def _collect(self) -> None:
        """Reap the trainer, and orphans that became children of this process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = status

    def _exit_status(self) -> tuple[int | None, signal.Signals | None]:
        """The trainer's exit code, or the signal that ended it. Both are None if it is not a child of this process."""
        if self.child is not None and self.status is None:
            with contextlib.suppress(ChildProcessError):
                self.status = os.waitpid(self.child, 0)[1]
        if self.status is None:
            return None, None
        code = os.waitstatus_to_exitcode(self.status)
        return (code, None) if code >= 0 else (None, signal.Signals(-code))

    def _record_exit(self, code: int | None, number: signal.Signals | None) -> None:
        """Write `exit.json`. On a full disk, free the reserve and wait for room."""
        verdict = classify(gather(self.run, self.attempt, code, number))
        self.continues = self._tries_smaller_batches(verdict) or self._starts_again(verdict)
        record = ExitRecord(
            verdict=verdict,
            time_wall=time.time(),
            adopted=self.child is None,
            continues=self.continues,
            requeues=self._requeues(verdict),
        )
        tries = EXIT_TRIES
        while tries:
            try:
                spares.write_struct(self.run.spares_path, self.path / EXIT, record)
                return
            except FileNotFoundError:
                return
            except OSError as error:
                say(f"exit.json: {error}")
                tries -= error.errno not in spares.FULL
                with contextlib.suppress(OSError):
                    self.run.reserve_path.unlink()
                    continue
                time.sleep(1.0)

    def _record_error(self, error: Exception) -> None:
        """Write why the trainer could not be started, for the verdict."""
        words = ErrorRecord(cause=cause_of(error), type=type(error).__name__, message=str(error))
        with contextlib.suppress(OSError):
            spares.write_struct(self.run.spares_path, self.path / ERROR, words)

    def _requeues(self, verdict: Verdict) -> bool:
        """Whether the run's job goes back to the queue. False here, because only `in_job` supervises a job."""
        return False

    def _tries_smaller_batches(self, verdict: Verdict) -> bool:
        """Take the next step of the out-of-memory ladder, which halves a batch size. False if there is none, or if a stop was
        requested."""
        if self.serving.stops or self.killing:
            return False
        beat = read_heartbeat(self.path)
        try:
            rung = ladder.descend(
                self.run, self.attempt, verdict, beat.phase if beat else "starting"
            )
        except (OSError, PlanError) as error:
            say(f"ladder: {error}")
            return False
        if rung is not None:
            say(rung.words)
        return rung is not None

    def _starts_again(self, verdict: Verdict) -> bool:
        """Whether the run starts again from its checkpoint: it has several devices, a signal ended one of its processes,
        and no stop was requested."""
        if self.serving.stops or self.killing:
            return False
        try:
            starts = again.begins_again(self.run, verdict)
        except (OSError, PlanError) as error:
            say(f"{again.FILE}: {error}")
            return False
        if starts:
            say(f"a process has ended: {verdict.evidence}; the run begins again")
        return starts

    def _act(self, request: requests.Request) -> None:
        """Do what an accepted request asks. Raises `OSError`."""
        if request.command == "kill":
            self._kill()
        elif request.command in ("pause", "continue"):
            self._pause(request.command == "pause")
        elif request.command == "profile":
            files.write_struct(self.path / requests.PROFILE, request)
        elif self.handle is not None:
            self.handle.signal(signal.SIGTERM)

    def _pause(self, paused: bool) -> None:
        """Make the trainer wait between two steps, or go on if it is not to be `paused`. Raises `OSError`."""
        if paused:
            (self.path / PAUSED).touch(mode=0o600)
        else:
            (self.path / PAUSED).unlink(missing_ok=True)

    def _kill(self) -> None:
        self.killing = True
        if self.handle is not None:
            self.handle.signal(signal.SIGKILL)

    def _snapshot(self, final: bool = False) -> None:
        """Update `state.json`, at most once a second."""
        now = boot_seconds()
        if now < self._next_snapshot and not final:
            return
        self._next_snapshot = now + SNAPSHOT_SECONDS
        if not final:
            spares.keep(self.run.spares_path)
        try:
            if self._save is None:
                self._save = snapshot_writer(self.run)
            self._save()
        except Exception:  # noqa: BLE001 - an unreadable event must not end supervision
            say(traceback.format_exc())
            self._save = lambda: None

    def _receipt(self) -> None:
        """Write the estimate and the measurement side by side to `receipt.json`."""
        from memconsole.runs.read.report.receipt import write_receipt

        try:
            write_receipt(self.run)
        except Exception:  # noqa: BLE001 - an unreadable event must not end supervision
            say(traceback.format_exc())


def snapshot_writer(run: RunDirectory) -> Callable[[], object]:
    """A function that updates `state.json`."""
    from memconsole.runs.read.follow import Follower

    return Follower(run).save_state


def say(text: str) -> None:
    """Write a line to the supervisor's log. A full disk loses it."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
