"""Tracks the phases of a training process and the memory of each, and waits while the run is paused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from memconsole.plan.sections.hybrid import PHASES, RESTORE
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.state.reduce import PROFILING
from memconsole.runs.record.log import events
from memconsole_trainer.control.controller import Controller
from memconsole_trainer.engine import Engine, MemoryReading
from memconsole_trainer.host.host_memory import HostMemory, highest_resident, tree_memory
from memconsole_trainer.loop.announcing import PAUSE_POLL_SECONDS, StopRequestedError, warn
from memconsole_trainer.loop.clock import TrainingClock
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.loop.ranks import RankReadings

MEMORY_EVERY_SECONDS = 1.0


class Watch:
    """Reports phases and memory, checks for stop requests, and agrees on them with the other processes."""

    def __init__(self, attempt: Attempt, engine: Engine, progress: Progress) -> None:
        self._attempt = attempt
        self._engine = engine
        self._progress = progress
        self.phase = "build"
        self.clock = TrainingClock(progress, engine.process_group)
        self.ranks = RankReadings(attempt, engine)
        self._peak_host = self._peak_anonymous = self._peak_shared = 0
        self._memory_reported = 0.0
        self._profiler_bytes = 0
        """Bytes that profilers have left in the memory of a CPU. They are subtracted from readings."""
        self._paused = False

    def enter(self, phase: str, detail: str = "") -> None:
        """Enter `phase`. Emits an event if the phase changes or a `detail` is given."""
        if phase != self.phase or detail:
            self._attempt.emit(events.Phase(phase=phase, detail=detail))
        self.phase = phase
        self.heartbeat()

    def change_phase(self, control: Controller) -> None:
        """Make a controller's transition to its next phase. A phase has its own memory peak, without
        that of the transition to it."""
        before = self.phase
        if before == control.phase:
            control.prepare(self._engine)
            return
        if before in PHASES:
            self._engine.synchronize()
            self.report_memory()
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
    def outside_training(self, phase: str) -> Iterator[None]:
        """Run the body in another phase. Its time does not count as training, and it has its own
        memory peak. An error leaves the phase as it is, so that it is reported for the phase in
        which it occurred."""
        before = self.phase
        self._engine.synchronize()  # work still queued belongs to training
        self.report_memory()
        self.clock.stop_lap()
        self.enter(phase)
        self._engine.reset_peak()
        bytes_before = self._cpu_bytes() if phase == PROFILING else None
        highest = HostMemory.highest_anonymous, HostMemory.highest_resident
        try:
            yield
        except StopRequestedError:
            self._return_to(before, phase, bytes_before, highest)
            raise
        self._return_to(before, phase, bytes_before, highest)

    def _return_to(
        self, before: str, phase: str, bytes_before: int | None, highest: tuple[int, int]
    ) -> None:
        """End `phase`, and continue the phase `before`. After profiling, its memory is left out of later readings."""
        self.enter(phase)
        self.report_memory()
        self._engine.reset_peak()
        if bytes_before is not None:
            self._profiler_bytes += max(0, self._cpu_bytes() - bytes_before)
            HostMemory.highest_anonymous, HostMemory.highest_resident = highest
        self.enter(before)
        self.clock.continue_lap()

    def _cpu_bytes(self) -> int:
        """Bytes in use on a CPU; 0 on other devices, whose memory a profiler does not use."""
        if self._engine.device.kind != "cpu":
            return 0
        return self._engine.memory().allocated_bytes or 0

    def heartbeat(self) -> None:
        """Record that the process is alive."""
        self._attempt.progress(self.phase, self._progress.step)

    def check_stop(self) -> None:
        """Record that the process is alive. Raises `StopRequestedError` on a stop request."""
        self.heartbeat()
        if self._attempt.stop_requested:
            raise StopRequestedError

    def agree(self, failed: bool = False) -> bool:
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
            self.agree()
        if not self._paused:
            return
        self._engine.synchronize()
        self.clock.count()
        self.clock.stop_lap()
        before = self.phase
        self.enter("paused")
        print(f"paused after step {self._progress.step:,}", flush=True)
        while self._paused:
            time.sleep(PAUSE_POLL_SECONDS)
            self.heartbeat()
            self.agree()
        self.enter(before)
        self.clock.continue_lap()
        self.clock.skip()

    def report_memory(self, *, rate_limited: bool = False) -> None:
        """Report the memory in use on the device and the host. The peak is that of the current phase. The memory
        of a profiler counts only while it records.

        If `rate_limited`, reports at most once a second.
        """
        if rate_limited and time.monotonic() - self._memory_reported < MEMORY_EVERY_SECONDS:
            return
        profiler = 0 if self.phase == PROFILING else self._profiler_bytes
        devices = tuple(_without(profiler, one) for one in self._engine.memories())
        reading, tree = max(devices, key=lambda one: one.peak_bytes or 0), tree_memory()
        peak_host = max(tree.resident, highest_resident()) - profiler
        anonymous = max(tree.anonymous, HostMemory.highest_anonymous) - profiler
        if self.phase != PROFILING:
            self._peak_host = max(self._peak_host, peak_host)
            self._peak_anonymous = max(self._peak_anonymous, anonymous)
            self._peak_shared = max(self._peak_shared, tree.shared)
        self._memory_reported = time.monotonic()
        host = tree.resident - profiler
        self._attempt.emit(
            events.Memory(
                phase=self.phase,
                step=self._progress.step,
                allocated_bytes=reading.allocated_bytes,
                peak_bytes=reading.peak_bytes,
                reserved_bytes=reading.reserved_bytes,
                device_bytes=reading.device_bytes,
                device_total_bytes=reading.device_total_bytes,
                host_bytes=host,
                peak_host_bytes=self._peak_host,
                peak_reserved_bytes=reading.peak_reserved_bytes,
                peak_host_anonymous_bytes=self._peak_anonymous,
                peak_host_shared_bytes=self._peak_shared,
            )
        )
        self.ranks.take(devices, self.phase, self._progress.step, host, self._peak_host)


def _without(profiler: int, reading: MemoryReading) -> MemoryReading:
    """A reading without the `profiler` bytes that a profiler has left."""

    def less(count: int | None) -> int | None:
        return None if count is None else max(0, count - profiler)

    return MemoryReading(
        less(reading.allocated_bytes),
        less(reading.peak_bytes),
        less(reading.reserved_bytes),
        less(reading.device_bytes),
        reading.device_total_bytes,
        less(reading.peak_reserved_bytes),
    )
