"""Tracks the phases of a training process, with the time and the memory of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from memconsole.plan.sections.hybrid import PHASES, RESTORE
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.state.reduce import PROFILING
from memconsole.runs.record.log import events
from memconsole_trainer.control.controller import Controller
from memconsole_trainer.engine import Engine, MemoryReading
from memconsole_trainer.host.host_memory import HostMemory, highest_resident, tree_memory
from memconsole_trainer.loop.announcing import StopRequestedError, warn
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.loop.ranks import RankReadings

MEMORY_EVERY_SECONDS = 1.0
PAUSE_POLL_SECONDS = 0.2


class Lap(NamedTuple):
    """Seconds of training, and how many of them passed in exchanges between processes; None if unknown."""

    seconds: float
    exchanged: float | None


class Watch:
    """Reports phases and memory, measures time, and checks for stop requests."""

    def __init__(self, attempt: Attempt, engine: Engine, progress: Progress) -> None:
        self._attempt = attempt
        self._engine = engine
        self._progress = progress
        self.phase = "build"
        self._clock = self._busy_since = time.monotonic()
        self._busy_seconds = 0.0
        self._exchanged_since, self._exchanged_seconds = 0.0, 0.0
        self.ranks = RankReadings(attempt, engine)
        self._peak_host = self._peak_anonymous = self._peak_shared = 0
        self._memory_said = 0.0
        self._left_bytes = 0
        """Bytes that profilers have left in the memory of a CPU. They are subtracted from readings."""
        self._paused = False

    def enter(self, phase: str, detail: str = "") -> None:
        """Enter `phase`. Emits an event if the phase changes or a `detail` is given."""
        if phase != self.phase or detail:
            self._attempt.emit(events.Phase(phase=phase, detail=detail))
        self.phase = phase
        self.beat()

    def follow(self, control: Controller) -> None:
        """Make a controller's transition to its next phase. A phase has its own memory peak, without
        that of the transition to it."""
        before = self.phase
        if before == control.phase:
            control.prepare(self._engine)
            return
        if before in PHASES:
            self._engine.synchronize()
            self.memory()
        control.prepare(self._engine)
        if before in PHASES:
            if control.phase != RESTORE or self._engine.device.kind == "cpu":
                self._engine.synchronize()  # elsewhere the next jump runs beside the copies
            self._engine.reset_peak()
        self.enter(control.phase)

    def warn(self, message: str) -> None:
        """Report a problem that does not end the run."""
        warn(self._attempt, message)

    @contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """Run the body in another phase. Its time does not count as training, and it has its own
        memory peak. An error leaves the phase as it is, so that it is reported for the phase in
        which it occurred."""
        before = self.phase
        self._engine.synchronize()  # work still queued belongs to training
        self.memory()
        self._put_aside()
        self.enter(phase)
        self._engine.reset_peak()
        held = self._held_bytes() if phase == PROFILING else None
        highest = HostMemory.highest_anonymous, HostMemory.highest_resident
        try:
            yield
        except StopRequestedError:
            self._leave(phase, before, held, highest)
            raise
        self._leave(phase, before, held, highest)

    def _leave(self, phase: str, before: str, held: int | None, highest: tuple[int, int]) -> None:
        self.enter(phase)
        self.memory()
        self._engine.reset_peak()
        if held is not None:
            self._left_bytes += max(0, self._held_bytes() - held)
            HostMemory.highest_anonymous, HostMemory.highest_resident = highest
        self.enter(before)
        self._go_on()

    def _put_aside(self) -> None:
        """Stop the clock of training: another phase begins."""
        self._busy_seconds += time.monotonic() - self._busy_since
        self._exchanged_seconds += (self._exchanged or 0.0) - self._exchanged_since

    def _go_on(self) -> None:
        """Continue the clock of training."""
        self._busy_since, self._exchanged_since = time.monotonic(), self._exchanged or 0.0

    @property
    def _exchanged(self) -> float | None:
        return self._engine.process_group.exchange_seconds

    def _held_bytes(self) -> int:
        """Bytes in use on a CPU; 0 on other devices, whose memory a profiler does not use."""
        if self._engine.device.kind != "cpu":
            return 0
        return self._engine.memory().allocated_bytes or 0

    def beat(self) -> None:
        """Record that the process is alive."""
        self._attempt.progress(self.phase, self._progress.step)

    def check_stop(self) -> None:
        """Record that the process is alive. Raises `StopRequestedError` on a stop request."""
        self.beat()
        if self._attempt.stop_requested:
            raise StopRequestedError

    def settle(self, failed: bool = False) -> bool:
        """Agree with the other processes, if there are any, on whether to stop and to pause. Returns
        whether one of them has `failed`."""
        attempt, process_group = self._attempt, self._engine.process_group
        if process_group.size == 1:
            self._paused = attempt.paused
            return failed
        stop, pause, any_failed = process_group.all_reduce_max(
            attempt.asked, attempt.paused, failed
        )
        attempt.stop_requested, self._paused = bool(stop), bool(pause and not stop)
        return bool(any_failed)

    def wait_while_paused(self) -> None:
        """Between two steps: wait while the run is paused. This time does not count as training or
        epoch time."""
        if self._engine.process_group.size == 1:
            self.settle()
        if not self._paused:
            return
        self._engine.synchronize()
        self.count()
        self._put_aside()
        before = self.phase
        self.enter("paused")
        print(f"paused after step {self._progress.step:,}", flush=True)
        while self._paused:
            time.sleep(PAUSE_POLL_SECONDS)
            self.beat()
            self.settle()
        self.enter(before)
        self._go_on()
        self._clock = self._busy_since

    def forget_clock(self) -> None:
        """Do not count the time since the last `count`."""
        self._clock = time.monotonic()

    def lap(self) -> Lap:
        """The training since the last call, without the time spent in `aside`."""
        self._put_aside()
        known = self._exchanged is not None
        found = Lap(self._busy_seconds, self._exchanged_seconds if known else None)
        self._busy_seconds = self._exchanged_seconds = 0.0
        self._go_on()
        return found

    def count(self) -> None:
        """Add the wall time since the last call to the totals of the run and the epoch."""
        now = time.monotonic()
        self._progress.elapsed_seconds += now - self._clock
        self._progress.epoch_seconds += now - self._clock
        self._clock = now

    def memory(self, now_and_then: bool = False) -> None:
        """Report the memory in use on the device and the host. The peak is that of the current phase. The memory
        of a profiler counts only while it records.

        With `now_and_then`, reports at most once a second.
        """
        if now_and_then and time.monotonic() - self._memory_said < MEMORY_EVERY_SECONDS:
            return
        left = 0 if self.phase == PROFILING else self._left_bytes
        devices = tuple(_without(left, one) for one in self._engine.memories())
        reading, tree = max(devices, key=lambda one: one.peak_bytes or 0), tree_memory()
        host = max(tree.resident, highest_resident()) - left
        anonymous = max(tree.anonymous, HostMemory.highest_anonymous) - left
        if self.phase != PROFILING:
            self._peak_host = max(self._peak_host, host)
            self._peak_anonymous = max(self._peak_anonymous, anonymous)
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
                host_bytes=tree.resident - left,
                peak_host_bytes=self._peak_host,
                peak_reserved_bytes=reading.peak_reserved_bytes,
                peak_host_anonymous_bytes=self._peak_anonymous,
                peak_host_shared_bytes=self._peak_shared,
            )
        )
        held = tree.resident - left
        self.ranks.take(devices, self.phase, self._progress.step, held, self._peak_host)


def _without(left: int, reading: MemoryReading) -> MemoryReading:
    """A reading without the `left` bytes that a profiler has left."""
    return MemoryReading(
        _less(reading.allocated_bytes, left),
        _less(reading.peak_bytes, left),
        _less(reading.reserved_bytes, left),
        _less(reading.device_bytes, left),
        reading.device_total_bytes,
        _less(reading.peak_reserved_bytes, left),
    )


def _less(count: int | None, left: int) -> int | None:
    return None if count is None else max(0, count - left)
