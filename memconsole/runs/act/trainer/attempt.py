"""The trainer's side of an attempt: locks, stop requests, events, heartbeat and final records."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO, cast

import msgspec

from memconsole.runs.record import files, spares
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures import shortfall
from memconsole.runs.record.failures.failure import ExitCode, cause_of, words_of
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.log.events import Error, Event
from memconsole.runs.record.processes import locks
from memconsole.runs.record.processes.heartbeat import HEARTBEAT, HEARTBEAT_BYTES, HeartbeatWriter
from memconsole.runs.record.processes.identity import boot_seconds
from memconsole.runs.record.records import ERROR, FINAL, PAUSED, ErrorRecord, FinalRecord
from memconsole.runs.record.redaction import OutputStream, redact, secret_values
from memconsole.runs.record.requests import PROFILE, Request, read_profile_request
from memconsole.runs.record.states import WAIT_DISK
from memconsole.sanitize import clean

RESERVE_BYTES = 64 << 20
LAST_WORDS_SECONDS = 60.0
"""How long the last records of an attempt wait for room on a full disk."""
TRACEBACK_CHARACTERS = 30_000
STOPPING = "stopping"
"""Name of the file by which the process that starts several trainers tells all of them to stop."""


class Fenced(SystemExit):
    """This attempt does not own the run: exit with code 76 and change nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(int(ExitCode.FENCED))
        self.message = message


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a trainer to save and stop. Slurm sends SIGUSR1 to people's own jobs (sbatch --signal=USR1@60)."""


class Attempt:
    """The trainer holds this for its whole life: ``with Attempt(run, number) as attempt:``.

    Signals of `STOP_SIGNALS` only set `stop_requested`. Forked children inherit these handlers and so
    survive a signal to the whole process group. Entering raises `Fenced` if the run belongs to a
    newer attempt, another trainer or orphans of an older attempt.
    """

    def __init__(self, run_directory: RunDirectory, number: int) -> None:
        self.run = run_directory
        self.number = number
        self.path = run_directory.attempt_path(number)
        self.stop_requested = False
        """Finish the step, save, and exit with code 75."""
        self.asked = False
        """A signal, or the file `STOPPING`, asked this process to stop."""
        self.shared = False
        """Several processes train together. They exchange `asked`, and then set `stop_requested` at the same step."""
        self.rank = 0
        self.step = 0
        self.checkpoint: str | None = None
        """The newest checkpoint, for the final record of an attempt that ends before it trains."""
        self.read_memory: Callable[[], tuple[int | None, int | None, int | None]] | None = None
        """A function that returns live tensor bytes (current, peak) and the process's peak of resident bytes. None until a
        device holds tensors."""
        self.listeners: list[Callable[[Event], None]] = []
        """Called with every event too."""
        self._pid = os.getpid()
        self._locks: list[locks.Lock] = []
        self._writing = threading.RLock()
        self._events: EventWriter | None = None
        self._heartbeat: HeartbeatWriter | None = None
        self._stacks: TextIO | None = None
        self._handlers: dict[int, Any] = {}
        self._secrets: list[str] = []
        self._reported: BaseException | None = None
        self._excepthook: Callable[..., Any] = sys.excepthook

    def __enter__(self) -> Attempt:
        os.umask(0o077)
        if not self.is_newest():
            self._refuse(f"attempt {self.number} of run {self.run.id} is not the newest")
        try:
            required = not self._in_job()
            self._locks.append(locks.take(self.run.trainer_lock, required=required))
            self._locks.append(locks.take_gang(self.run.gang_lock, required=required))
        except locks.LockHeld as error:
            self._release()
            self._refuse(f"run {self.run.id}: {error}")
        if not self.is_newest():
            self._release()
            self._refuse(f"attempt {self.number} of run {self.run.id} is not the newest")
        self._prepare()
        self._events = EventWriter(self.path, secrets=self._secrets, on_full=self.free_reserve)
        with contextlib.suppress(OSError):  # so that it can tell that the disk is full
            spares.reserve(self.run.spares_path, self.path / HEARTBEAT, HEARTBEAT_BYTES)
        self._heartbeat = HeartbeatWriter(self.path)
        self.keep_reserve()
        self.progress("import", 0)
        return self

    def _prepare(self) -> None:
        """Guard the output and install signal handlers. Then read whether a stop was requested before there were any."""
        self._secrets = secret_values(os.environ)
        self._guard_output()
        self._install()
        if self.shared and (self.path / STOPPING).exists():
            self.asked = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exception is not None and not isinstance(exception, SystemExit):
            self.report(exception)
        self._restore()
        if self._events is not None:
            self._wait_until(self._events.settled)
            self._events.close()
            self._events = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        self.free_reserve()
        self._release()

    def _in_job(self) -> bool:
        """Whether a scheduler's job runs this process. If the file system has no locks, the scheduler knows which
        processes are alive."""
        record = self.run.attempt_record(self.number)
        return record is not None and record.job is not None

    @property
    def paused(self) -> bool:
        """Whether the trainer should pause between two steps. A stop takes precedence."""
        return not self.stop_requested and os.path.exists(self.path / PAUSED)

    def take_profile_request(self) -> Request | None:
        """The request to profile steps, returned once; None if there is none. Microseconds."""
        path = self.path / PROFILE
        if not os.path.exists(path):
            return None
        request = read_profile_request(path)
        with contextlib.suppress(OSError):
            path.unlink()
        return request

    def emit(self, event: Event, durable: bool = False) -> None:
        """Append to the event log, from any thread of the trainer. Never raises for a full disk."""
        if os.getpid() != self._pid:
            return
        with self._writing:
            if self._events is not None:
                self._events.write(event, durable)
            for listener in self.listeners:
                listener(event)

    def progress(self, phase: str, step: int, bytes_written: int = 0) -> None:
        """Report progress, at each micro-batch and while writing a checkpoint. Takes microseconds.

        `bytes_written` is how much of a checkpoint is on disk. While it grows, the deadline of a
        stop is extended.
        """
        self.step = step
        if self._heartbeat is not None and os.getpid() == self._pid:
            self._heartbeat.beat(phase, step, bytes_written, boot_seconds())

    def is_newest(self) -> bool:
        """Whether this attempt still owns the run. Check before every commit; if not, exit
        with 76.
        """
        return self.run.newest_attempt() == self.number

    def finish(
        self, exit_code: int, step: int, reason: str, checkpoint: str | None = None
    ) -> FinalRecord:
        """Write `final.json`, the trainer's last record. `reason` is one of `Verdict.reason`."""
        record = FinalRecord(
            exit_code=int(exit_code),
            step=step,
            reason=reason,
            checkpoint=checkpoint,
            time_wall=time.time(),
        )
        self._write_last(FINAL, record)
        return record

    def report(self, exception: BaseException) -> str:
        """Record the exception that ends this attempt, once, as `error.json` and an `Error` event.

        Returns its cause, for `failure.failure_of`.
        """
        if self._reported is exception:
            return cause_of(exception)
        self._reported = exception
        record = self._error_record(exception)
        if self.shared:  # The first failure is the cause: the others then lose the connection.
            record = files.read_struct(self.path / ERROR, ErrorRecord) or record
        self.emit(self._error_event(record), durable=True)
        self._write_last(ERROR, record)
        return record.cause

    def _error_record(self, exception: BaseException) -> ErrorRecord:
        trace = "".join(traceback.format_exception(exception))[-TRACEBACK_CHARACTERS:]
        name = type(exception).__name__
        return ErrorRecord(
            cause=cause_of(exception),
            type=name,
            message=clean(redact(words_of(exception), self._secrets))[:4096] or name,
            traceback=clean(redact(trace, self._secrets)),
            step=self.step,
            time_wall=time.time(),
        )

    def _error_event(self, record: ErrorRecord) -> Error:
        """The event of a failure. If memory ran out, it says how much was held and requested.

        The frames that hold the tensors are still alive here, so they are still counted.
        """
        event = Error(cause=record.cause, message=record.message, traceback=record.traceback)
        if record.cause != "out_of_memory":
            return event
        held = peak = host = None
        with contextlib.suppress(Exception):
            if self.read_memory is not None:
                held, peak, host = self.read_memory()
        from_message = shortfall.held_bytes(record.message)
        return msgspec.structs.replace(
            event,
            held_bytes=max((n for n in (held, from_message) if n is not None), default=None),
            peak_bytes=peak,
            peak_host_bytes=host,
            requested_bytes=shortfall.requested_bytes(record.message),
        )

    def free_reserve(self) -> None:
        """Delete the reserve file, so that the last records fit on a full disk."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.run.reserve_path.unlink()

    def _write_last(self, name: str, record: FinalRecord | ErrorRecord) -> None:
        """Write a last record. On a full disk, waits for room; a record without its traceback needs
        none."""

        def written() -> bool:
            try:
                spares.write_struct(self.run.spares_path, self.path / name, record)
            except OSError as error:
                return error.errno not in spares.FULL
            return True

        if written():
            return
        print(f"{name}: no room", file=sys.stderr)
        self.free_reserve()
        if isinstance(record, ErrorRecord):
            with contextlib.suppress(OSError):
                short = msgspec.structs.replace(record, traceback="", message=record.message[:1000])
                spares.write_struct(self.run.spares_path, self.path / name, short)
        self._wait_until(written)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """On a full disk: try again until `done`, for a while."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while not done() and time.monotonic() < deadline:
            self.progress(WAIT_DISK, self.step)
            time.sleep(0.2)

    def _refuse(self, why: str) -> None:
        print(f"memconsole: fenced: {why}", file=sys.stderr, flush=True)
        raise Fenced(why)

    def keep_reserve(self) -> None:
        """Reserve disk space for the last records, less if little is free. Call it again once there
        is room after the disk was full."""
        if self.run.reserve_path.exists():
            return
        with contextlib.suppress(OSError, AttributeError):
            size = min(RESERVE_BYTES, shutil.disk_usage(self.run.path).free // 16)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.run.reserve_path, flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(size, 1))
            finally:
                os.close(descriptor)

    def _guard_output(self) -> None:
        """Guard what Python code prints against secrets and a full disk, until the process ends."""
        if not isinstance(sys.stderr, OutputStream):
            sys.stdout = cast(TextIO, OutputStream(sys.stdout, self._secrets))
            sys.stderr = cast(TextIO, OutputStream(sys.stderr, self._secrets))

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._handlers[number] = signal.signal(number, self._on_stop)
            self._handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        name = f"stacks-{self.rank}.log" if self.rank else "stacks.log"
        self._stacks = os.fdopen(os.open(self.path / name, flags, 0o600), "w")
        faulthandler.enable(self._stacks)
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
            self._stacks.close()
            self._stacks = None
        sys.excepthook = self._excepthook

    def _release(self) -> None:
        while self._locks:
            self._locks.pop().release()

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.shared:
            self.stop_requested = True

    def _on_exception(
        self, kind: type[BaseException], exception: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._pid and not issubclass(kind, KeyboardInterrupt):
            self.report(exception)
        self._excepthook(kind, exception, trace)
