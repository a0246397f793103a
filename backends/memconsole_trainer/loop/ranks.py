"""The measurements of each rank (a process of a run, or one of its devices), recorded in the run's log.

Every process but the first writes its measurements into a small file, and the first process logs them. No process waits
for another one.
"""

from __future__ import annotations

import time

from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.state.ranks import highest
from memconsole.runs.read.state.reduce import PROFILING
from memconsole.runs.record.log import readings
from memconsole.runs.record.log.events import RankReading, Ranks
from memconsole_trainer.engine import Engine, MemoryReading

SECONDS_FOR_EIGHT = 1.0
"""Seconds between two logged readings of eight ranks. More ranks are logged less often, so that the log grows no
faster."""

DECAY = 0.7
"""Weight of the old mean when a reading is added to it. Older steps still count, so that a single step does not
change which rank is reported as slow."""


def rank_count(engine: Engine) -> int:
    """The number of ranks of a run: its processes times the devices that each process can measure separately."""
    return engine.process_group.size * len(engine.memories())


class RankReadings:
    """The readings of this process; in the first one also those of the others."""

    def __init__(self, attempt: Attempt, engine: Engine) -> None:
        self._attempt = attempt
        self._engine = engine
        self._own: dict[int, RankReading] = {}
        """The newest reading of each device of this process, by rank, with the peaks of all before it."""
        self._steps = 0.0
        self._seconds = 0.0
        self._exchanged: float | None = None
        """Seconds of exchanges in the newest steps; older steps count less and less."""
        self._pace: tuple[float | None, float | None] = None, None
        """Seconds of a step, and of its exchanges, at the last reading."""
        self._reported = float("-inf")

    def count(self, steps: int, seconds: float, exchanged: float | None) -> None:
        """Add a number of steps, their seconds, and how many of these were spent in exchanges."""
        self._steps += steps
        self._seconds += seconds
        if exchanged is not None:
            self._exchanged = exchanged + (self._exchanged or 0.0)

    def take(
        self,
        memories: tuple[MemoryReading, ...],
        phase: str,
        step: int,
        host_bytes: int,
        peak_host_bytes: int,
    ) -> None:
        """Record the memory of each device of this process."""
        rank, size = self._engine.process_group.rank, self._engine.process_group.size
        if size * len(memories) == 1:
            return
        if self._steps:
            exchanged = self._exchanged
            each = None if exchanged is None else exchanged / self._steps
            self._pace = self._seconds / self._steps, each
            self._steps, self._seconds = DECAY * self._steps, DECAY * self._seconds
            self._exchanged = None if exchanged is None else DECAY * exchanged
        for n, memory in enumerate(memories, rank * len(memories)):
            self._own[n] = self._reading(n, phase, step, memory, host_bytes, peak_host_bytes)
        if rank:
            readings.tell(self._attempt.path, rank, tuple(self._own.values()))
            return
        if time.monotonic() - self._reported >= SECONDS_FOR_EIGHT * max(
            1.0, size * len(memories) / 8
        ):
            self._report(step)

    def last(self, step: int) -> None:
        """Call in every process after the last measurement of an attempt. Logs the readings once all processes have
        written theirs."""
        process_group = self._engine.process_group
        if not self._own:
            return
        process_group.all_reduce_max(0)
        if not process_group.rank:
            self._report(step)

    def _report(self, step: int) -> None:
        others = readings.told(self._attempt.path, self._engine.process_group.size)
        self._reported = time.monotonic()
        self._attempt.emit(Ranks(step=step, ranks=(*self._own.values(), *others)))

    def _reading(
        self, rank: int, phase: str, step: int, memory: MemoryReading, host: int, peak_host: int
    ) -> RankReading:
        """The current reading, with the peaks of all readings before. Peaks while a profiler records are left out."""
        before = self._own.get(rank) or RankReading(rank=rank, step=step)
        profiled, peaks = phase == PROFILING, dict(before.peaks_by_phase)
        seen = highest(memory.allocated_bytes, memory.peak_bytes)
        if seen is not None and not profiled:
            peaks[phase] = max(peaks.get(phase, 0), seen)
        reserved = highest(memory.reserved_bytes, memory.peak_reserved_bytes)
        seconds, exchanged = self._pace
        return RankReading(
            rank=rank,
            step=step,
            allocated_bytes=memory.allocated_bytes,
            peak_bytes=max(peaks.values(), default=None),
            device_bytes=memory.device_bytes,
            peak_device_bytes=highest(
                before.peak_device_bytes, None if profiled else memory.device_bytes
            ),
            peak_reserved_bytes=highest(before.peak_reserved_bytes, None if profiled else reserved),
            host_bytes=host,
            peak_host_bytes=peak_host,
            peaks_by_phase=peaks,
            step_seconds=seconds,
            exchange_seconds=exchanged,
        )
