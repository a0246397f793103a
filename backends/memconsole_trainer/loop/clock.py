"""The clock of a training process: the time that counts as training."""

from __future__ import annotations

import time
from typing import NamedTuple

from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.process_group import ProcessGroup


class Lap(NamedTuple):
    """Seconds of training, and how many of them passed in exchanges between processes; None if unknown."""

    seconds: float
    exchanged: float | None


class TrainingClock:
    """Measures two times. The totals of the run and of the epoch are wall time, without pauses. A lap is only the time of
    training steps, without evaluations, checkpoints and samples."""

    def __init__(self, progress: Progress, process_group: ProcessGroup) -> None:
        self._progress, self._process_group = progress, process_group
        self._counted_until = self._lap_since = time.monotonic()
        self._lap_seconds = 0.0
        self._exchanged_since, self._exchanged_seconds = 0.0, 0.0

    def count(self) -> None:
        """Add the wall time since the last call to the totals of the run and the epoch."""
        now = time.monotonic()
        self._progress.elapsed_seconds += now - self._counted_until
        self._progress.epoch_seconds += now - self._counted_until
        self._counted_until = now

    def skip(self) -> None:
        """Leave the wall time since the last `count` out of the totals."""
        self._counted_until = time.monotonic()

    def stop_lap(self) -> None:
        """Stop the time of the lap: something else than training begins."""
        self._lap_seconds += time.monotonic() - self._lap_since
        self._exchanged_seconds += (self._exchanged or 0.0) - self._exchanged_since

    def continue_lap(self) -> None:
        """Continue the time of the lap."""
        self._lap_since, self._exchanged_since = time.monotonic(), self._exchanged or 0.0

    def lap(self) -> Lap:
        """The training since the last call."""
        self.stop_lap()
        exchanged = None if self._exchanged is None else self._exchanged_seconds
        lap = Lap(self._lap_seconds, exchanged)
        self._lap_seconds = self._exchanged_seconds = 0.0
        self.continue_lap()
        return lap

    @property
    def _exchanged(self) -> float | None:
        return self._process_group.exchange_seconds
