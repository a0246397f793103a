"""Memory use over a whole run, for the small histories next to the gauges."""

from __future__ import annotations

import msgspec

from memconsole.runs.read.curves.curve import GaugeCurves
from memconsole.runs.read.curves.history import History
from memconsole.runs.record import events

RECENT_POINTS = 8
BUCKETS = 127
"""A history is one screen row, which needs about one bucket per cell and few recent points."""


def _history() -> History:
    return History(most_recent=RECENT_POINTS, most_buckets=BUCKETS)


class GaugeHistory(msgspec.Struct):
    """Bytes by step, decimated. Steps of a resumed attempt replace the steps it repeats."""

    allocated: History = msgspec.field(default_factory=_history)
    device: History = msgspec.field(default_factory=_history)
    host: History = msgspec.field(default_factory=_history)

    def take(self, record: events.Memory) -> None:
        """Add a reading. The allocated value is the peak since the last reading, if it is known."""
        allocated = [n for n in (record.allocated_bytes, record.peak_bytes) if n is not None]
        if allocated:
            self.allocated.add_highest(record.step, float(max(allocated)))
        if record.device_bytes is not None:
            self.device.add_highest(record.step, float(record.device_bytes))
        if record.host_bytes is not None:
            self.host.add_highest(record.step, float(record.host_bytes))

    def truncate(self, step: int) -> None:
        """Drop the readings after `step`."""
        for history in (self.allocated, self.device, self.host):
            history.truncate(step)

    def curves(self) -> GaugeCurves:
        return GaugeCurves(self.allocated.whole(), self.device.whole(), self.host.whole())
