"""One tracer process: runs at low priority in its own session, exchanges JSON lines, is killed with its group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import IO

import msgspec

from memconsole import typed_json
from memconsole.memory.exact.timeline import TracerAnswer, TracerQuestion
from memconsole.plan.machine.inductor_cache import inductor_cache
from memconsole.plan.machine.packages import missing_words
from memconsole.user_folders import NoHomeError

GROUP = "memconsole.tracers"
"""Entry points: a backend's name and the module that ``python -m`` runs as its tracer."""
NICENESS = 10
"""How much nicer a tracer is than the process that asks it."""
LINE_BYTES = 16 << 20
"""Longest answer that is accepted, in bytes."""
STDERR_BYTES = 8 << 10
"""How many of the last bytes of a tracer's standard error are kept."""


class TracerEnded(msgspec.Struct, frozen=True):
    """Message: a tracer process has ended."""

    reason: str
    """One sentence."""


Heard = Callable[["Tracer", TracerAnswer | TracerEnded], None]


def tracer_modules() -> dict[str, str]:
    """Every installed tracer's module by its backend's name; nothing is imported."""
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}


class Tracer:
    """Runs ``python -m module``. Calls `hear` from a reader thread with each answer and when the process ends."""

    def __init__(
        self,
        backend: str,
        module: str,
        hear: Heard,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process. Raises `OSError`."""
        self.backend = backend
        self._hear = hear
        self._said = bytearray()
        self._closed = False
        self.answered = False
        """Whether it has sent any answer."""
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_with_cache(os.environ if environment is None else environment),
            start_new_session=True,
        )
        self.pid = self._process.pid
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, self.pid, os.nice(0) + NICENESS)
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None
        assert stderr is not None
        self._errors = threading.Thread(target=self._drain, args=(stderr,), daemon=True)
        self._answers = threading.Thread(target=self._listen, args=(stdout,), daemon=True)
        self._errors.start()
        self._answers.start()

    def ask(self, question: TracerQuestion) -> None:
        """Send a question. If the process is dead, `hear` reports it; this method does not raise."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            pipe.write(msgspec.json.encode(question) + b"\n")
            pipe.flush()

    def kill(self) -> None:
        """Kill the process and its group. `hear` is not called again."""
        self._closed = True
        # The group id cannot be reused by another process until the leader has been waited for.
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the reader threads."""
        for thread in (self._answers, self._errors):
            if thread is not threading.current_thread():
                thread.join(timeout_seconds)

    def _listen(self, pipe: IO[bytes]) -> None:
        decoder = typed_json.decoder(TracerAnswer)
        reason = ""
        with pipe:
            while line := pipe.readline(LINE_BYTES):
                try:
                    answer = decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    reason = f"the {self.backend} tracer sent an invalid answer"
                    self._end_group()
                    break
                self.answered = True
                if not self._closed:
                    self._hear(self, answer)
        self._bury_group()
        self._errors.join(1.0)
        status = self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if not self._closed:
            self._hear(self, TracerEnded(reason or self._why(status)))

    def _bury_group(self) -> None:
        """Kill the children that an ended tracer left running. This must precede `wait`, which frees the group id."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(OSError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
                os.killpg(self.pid, signal.SIGKILL)

    def _end_group(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def _drain(self, pipe: IO[bytes]) -> None:
        with pipe:
            while piece := os.read(pipe.fileno(), 4096):
                self._said += piece
                del self._said[:-STDERR_BYTES]

    def _why(self, status: int) -> str:
        """Which packages the tracer lacks; else how the process ended, with the last line of its standard error if there
        is one."""
        lacking = missing_words(self.backend)
        if status > 0 and lacking:
            return lacking
        if status < 0:
            try:
                how = f"was ended by {signal.Signals(-status).name}"
            except ValueError:
                how = f"was ended by signal {-status}"
        else:
            how = f"ended with exit status {status}"
        words = bytes(self._said).decode(errors="replace").strip().splitlines()
        last = f": {words[-1].strip()[:200]}" if words else ""
        return f"the {self.backend} tracer {how}{last}"


def _with_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a tracer: it compiles in this user's cache folder, if there is one."""
    try:
        return inductor_cache(environment) | dict(environment)
    except NoHomeError:
        return dict(environment)
