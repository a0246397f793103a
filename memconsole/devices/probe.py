"""Runs the device probe in a process of its own, because a driver call can hang or crash.

``python -m memconsole.devices.probe`` is that process (see `sampler`). It prints one JSON line per
interval and ends when its standard input closes. The console never waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from enum import Enum

import msgspec

from memconsole import typed_json
from memconsole.devices.reading import Devices, without_numbers

SILENT_SECONDS = 4.0
"""A silence of this length is reported."""
STALE_SECONDS = 10.0
"""After this silence the last numbers are no longer shown."""
HUNG_SECONDS = 30.0
"""After this silence the process is killed and replaced."""
RETRY_SECONDS = 5.0
"""After a driver crash the next probe skips that driver for this long; each crash doubles it."""
LONGEST_WAIT_SECONDS = 300.0
ONCE_SECONDS = 30.0
"""The most a single reading takes: the first call of an idle driver on a busy machine can take many seconds."""
LINE_BYTES = 1 << 20

_DRIVER_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)


class _End(Enum):
    """Why the console stops listening to one probe process."""

    CLOSING = "the console closes"
    RETRY = "it is time to ask the driver again"
    CRASHED = "a driver call crashed it"
    EXITED = "it ended"
    HUNG = "it hung"


class Probe:
    """Runs a probe process and keeps its newest reading. `start` and `latest` return at once."""

    def __init__(
        self,
        interval_seconds: float = 1.0,
        *,
        environment: Mapping[str, str] | None = None,
        hung_seconds: float = HUNG_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`environment` is passed to the probe; None passes on this process's environment."""
        self.interval_seconds = interval_seconds
        self.restarts = 0
        """How many crashed or hung probes were replaced."""
        self.pid: int | None = None
        """The process id of the current probe."""
        self._environment = None if environment is None else dict(environment)
        self._hung_seconds = hung_seconds
        self._retry_seconds = retry_seconds
        self._reading: Devices | None = None
        self._heard = time.monotonic()
        self._problem = ""
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._unreaped: list[subprocess.Popen[bytes]] = []
        """Ended processes that are stuck in the kernel."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin probing. A second call does nothing."""
        if self._thread is None:
            self._heard = time.monotonic()
            self._thread = threading.Thread(
                target=self._keep_probing, name="device-probe", daemon=True
            )
            self._thread.start()

    def latest(self) -> Devices | None:
        """The newest reading; None before the first. Never blocks.

        Notes report a probe in trouble. After a long silence the reason replaces its numbers.
        """
        reading, problem = self._reading, self._problem
        silent = time.monotonic() - self._heard
        notes = [problem] if problem else []
        if self._thread is not None and silent >= max(SILENT_SECONDS, 3 * self.interval_seconds):
            notes.append(f"device probe silent for {silent:.0f} s")
        if not notes:
            return reading
        if reading is None:
            return Devices(devices=(), notes=tuple(notes), unanswered=("device probe",))
        devices = reading.devices
        if silent >= max(STALE_SECONDS, 3 * self.interval_seconds):
            devices = tuple(without_numbers(device, notes[-1]) for device in devices)
        return msgspec.structs.replace(reading, devices=devices, notes=(*reading.notes, *notes))

    def close(self) -> None:
        """End the probe process and its thread; waits two seconds at most."""
        self._closing.set()
        process = self._process
        if process is not None:
            _close_input(process)
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def __enter__(self) -> Probe:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_probing(self) -> None:
        """Start, listen to and replace the probe. Only this thread touches the process."""
        nvidia_crash, crashes, failures = "", 0, 0
        while not self._closing.is_set():
            heard_before = self._heard
            pause = min(self._retry_seconds * 2 ** min(crashes, 10), LONGEST_WAIT_SECONDS)
            end, how = self._run_one(
                nvidia_crash, time.monotonic() + pause if nvidia_crash else None
            )
            if end is _End.CLOSING:
                return
            if end is _End.RETRY:
                nvidia_crash = ""
                continue
            self.restarts += 1
            if end is _End.CRASHED and not nvidia_crash:
                # The next probe skips the driver that crashed; the other gauges go on.
                nvidia_crash, crashes = f"a driver call crashed the probe ({how})", crashes + 1
                continue
            failures = 0 if self._heard > heard_before else failures + 1
            self._problem = f"device probe {how}, started again"
            self._closing.wait(min(0.5 * 2 ** min(failures, 10), LONGEST_WAIT_SECONDS))

    def _run_one(self, nvidia_crash: str, until: float | None) -> tuple[_End, str]:
        """Start one probe process and read its lines until it ends, hangs, or the time `until` has come. Returns why, and how
        it ended in words. With `nvidia_crash`, the reason, the process does not ask the NVIDIA driver."""
        self._unreaped = [p for p in self._unreaped if p.poll() is None]
        try:
            process = _spawn(
                [f"--interval={self.interval_seconds}"],
                nvidia_crash,
                self._environment,
                until_input_closes=True,
            )
        except OSError as error:
            return _End.EXITED, f"cannot be started: {error.strerror}"
        self._process, self.pid = process, process.pid
        try:
            return self._read_lines(process, until)
        finally:
            self._process = self.pid = None
            if not _end(process):
                self._unreaped.append(process)

    def _read_lines(
        self, process: subprocess.Popen[bytes], until: float | None
    ) -> tuple[_End, str]:
        assert process.stdout is not None
        descriptor, pending = process.stdout.fileno(), b""
        started = time.monotonic()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while not self._closing.is_set():
            now = time.monotonic()
            if until is not None and now >= until:
                return _End.RETRY, ""
            if now - max(self._heard, started) > self._hung_seconds:
                return _End.HUNG, f"hung for {now - max(self._heard, started):.0f} s"
            if not poller.poll(200):
                continue
            block = os.read(descriptor, 65536)
            if not block:
                return _how_ended(process)
            *lines, pending = (pending + block)[-LINE_BYTES:].split(b"\n")
            for line in lines:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    self._reading = typed_json.decode(line, Devices)
                    self._heard = time.monotonic()
                    self._problem = ""
        return _End.CLOSING, ""


def read_once(
    timeout_seconds: float = ONCE_SECONDS, *, environment: Mapping[str, str] | None = None
) -> Devices:
    """One reading, as soon as every driver has answered, and within `timeout_seconds`.

    A driver that is not installed answers at once. `unanswered` names those that did not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds
    failure = nvidia_crash = ""
    for _ in range(2):
        left = deadline - time.monotonic()
        if left <= 0.1:
            break
        try:
            process = _spawn(["--once", f"--until={deadline - 0.2:.3f}"], nvidia_crash, environment)
        except OSError as error:
            failure = f"cannot be started: {error.strerror}"
            break
        try:
            answer, _unused = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            break
        finally:
            _end(process)
        try:
            return typed_json.decode(answer, Devices)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _, how = _how_ended(process)
            failure = nvidia_crash = f"a driver call crashed the probe ({how})"
    from memconsole.devices.host import Host

    reading, notes = Host().read()
    why = failure or f"no answer within {timeout_seconds:g} s"
    return Devices(
        devices=(reading,),
        notes=(*notes, f"device probe: {why}; other devices are unknown"),
        unanswered=() if failure else ("device probe",),
    )


def _spawn(
    arguments: list[str],
    nvidia_crash: str,
    environment: Mapping[str, str] | None,
    *,
    until_input_closes: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a probe process. With `nvidia_crash`, the reason, it does not ask the NVIDIA driver."""
    command = [sys.executable, "-P", "-m", "memconsole.devices.probe", *arguments]
    if nvidia_crash:
        command.append(f"--without-nvidia={nvidia_crash}")
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE if until_input_closes else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # A driver library may print; that must not reach the screen.
        stderr=subprocess.DEVNULL,
        # Ctrl-C and the terminal's hang-up go to the console only.
        start_new_session=True,
        env=None if environment is None else dict(environment),
    )


def _how_ended(process: subprocess.Popen[bytes]) -> tuple[_End, str]:
    """How the process ended, from its exit status. Its output has closed already."""
    try:
        code = process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        return _End.HUNG, "closed its output and hung"
    if code < 0:
        number = -code
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
            crash = signal.Signals(number) in _DRIVER_CRASHES
            return (_End.CRASHED, name) if crash else (_End.EXITED, f"was killed by {name}")
        return _End.EXITED, f"was killed by signal {number}"
    return _End.EXITED, f"ended with code {code}"


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End and reap a probe process. False if it is stuck in the kernel and cannot be reaped yet."""
    _close_input(process)
    try:
        process.wait(timeout=0.3)
    except subprocess.TimeoutExpired:
        process.kill()
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


if __name__ == "__main__":
    from memconsole.devices.sampler import main

    main(sys.argv[1:])
