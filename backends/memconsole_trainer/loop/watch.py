"""The phases of a training process, with the time and the memory of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from memconsole.runs.act.attempt import Attempt
from memconsole.runs.record import events
from memconsole_trainer.engine import Engine
from memconsole_trainer.host.host_memory import HostMemory, resident, tree_memory
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.loop.setup import StopRequestedError

MEMORY_EVERY_SECONDS = 1.0
PAUSE_POLL_SECONDS = 0.2


class Watch:
    """Tells phases and memory, keeps the clocks, and notices a stop request."""

    def __init__(self, attempt: Attempt, engine: Engine, progress: Progress) -> None:
        self._attempt = attempt
        self._engine = engine
        self._progress = progress
        self.phase = "build"
        self._clock = self._busy_since = time.monotonic()
        self._busy_seconds = 0.0
        self._peak_host = self._peak_anonymous = self._peak_shared = 0
        self._memory_said = 0.0

    def enter(self, phase: str, detail: str = "") -> None:
        """Be in `phase` from now on, and say so where that, or a `detail` of it, is news."""
        if phase != self.phase or detail:
            self._attempt.emit(events.Phase(phase=phase, detail=detail))
        self.phase = phase
        self.beat()

    def warn(self, message: str) -> None:
        """Tell the person something that does not end the run."""
        print(f"warning: {message}", flush=True)
        self._attempt.emit(events.Warning(message=message))

    @contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """Another phase beside the present one, whose time is not training's and whose peak of memory
        is its own. What fails in it fails in that phase: there is no way back from it."""
        before = self.phase
        self._engine.synchronize()  # what is still queued is training
        self.memory()
        self._busy_seconds += time.monotonic() - self._busy_since
        self.enter(phase)
        self._engine.reset_peak()
        try:
            yield
        except StopRequestedError:
            self._leave(phase, before)
            raise
        self._leave(phase, before)

    def _leave(self, phase: str, before: str) -> None:
        self.enter(phase)
        self.memory()
        self._engine.reset_peak()
        self.enter(before)
        self._busy_since = time.monotonic()

    def beat(self) -> None:
        """A sign of life."""
        self._attempt.progress(self.phase, self._progress.step)

    def check_stop(self) -> None:
        """A sign of life. Raises `StopRequestedError` when someone asked to stop."""
        self.beat()
        if self._attempt.stop_requested:
            raise StopRequestedError

    def wait_while_paused(self) -> None:
        """Between two steps: wait as long as someone wants it. The time is not training's, nor the epoch's."""
        if not self._attempt.paused:
            return
        self._engine.synchronize()
        self.count()
        self._busy_seconds += time.monotonic() - self._busy_since
        before = self.phase
        self.enter("paused")
        print(f"paused after step {self._progress.step:,}", flush=True)
        while self._attempt.paused:
            time.sleep(PAUSE_POLL_SECONDS)
            self.beat()
        self.enter(before)
        self._clock = self._busy_since = time.monotonic()

    def lap(self) -> float:
        """Seconds of training since the last lap, everything done `aside` left out."""
        now = time.monotonic()
        seconds = self._busy_seconds + now - self._busy_since
        self._busy_seconds, self._busy_since = 0.0, now
        return seconds

    def count(self) -> None:
        """Add the wall time since the last call to the run's and the epoch's."""
        now = time.monotonic()
        self._progress.elapsed_seconds += now - self._clock
        self._progress.epoch_seconds += now - self._clock
        self._clock = now

    def memory(self, now_and_then: bool = False) -> None:
        """Tell how full the device and the host are; the peak is this phase's since it began.

        With `now_and_then` at most once a second.
        """
        if now_and_then and time.monotonic() - self._memory_said < MEMORY_EVERY_SECONDS:
            return
        reading = self._engine.memory()
        tree = tree_memory()
        self._peak_host = max(self._peak_host, tree.resident, resident().high)
        self._peak_anonymous = max(
            self._peak_anonymous, tree.anonymous, HostMemory.highest_anonymous
        )
        self._peak_shared = max(self._peak_shared, tree.shared)
        self._memory_said = time.monotonic()
        self._attempt.emit(
            events.Memory(
                phase=self.phase,
                step=self._progress.step,
                allocated_bytes=reading.allocated_bytes,
                peak_bytes=reading.peak_bytes,
                reserved_bytes=reading.reserved_bytes,
                device_bytes=reading.device_bytes,
                device_total_bytes=reading.device_total_bytes,
                host_bytes=tree.resident,
                peak_host_bytes=self._peak_host,
                peak_reserved_bytes=reading.peak_reserved_bytes,
                peak_host_anonymous_bytes=self._peak_anonymous,
                peak_host_shared_bytes=self._peak_shared,
            )
        )
