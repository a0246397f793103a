"""Curves of what a run logs at each step besides its losses, over the whole run: speed, rates and memory."""

from __future__ import annotations

import math

import msgspec

from memconsole.runs.read.curves.curve import GaugeCurves, SeriesCurves
from memconsole.runs.read.curves.history import History
from memconsole.runs.record.log import events

BUCKETS = 127
"""A series is one screen row or a small chart, which needs about one bucket per cell."""


def _charted() -> History:
    return History(most_recent=200, most_buckets=BUCKETS)


def _one_row() -> History:
    return History(most_recent=8, most_buckets=BUCKETS)


class _Histories(msgspec.Struct):
    """Values by step, decimated. Steps of a resumed attempt replace the steps it repeats."""

    def histories(self) -> tuple[History, ...]:
        """In the order of the fields."""
        return tuple(getattr(self, name) for name in self.__struct_fields__)

    def truncate(self, step: int) -> None:
        """Drop the values after `step`."""
        for history in self.histories():
            history.truncate(step)


class StepSeries(_Histories):
    """The values in the records of steps, except the loss."""

    gradient_norm: History = msgspec.field(default_factory=_charted)
    learning_rate: History = msgspec.field(default_factory=_charted)
    units_per_second: History = msgspec.field(default_factory=_charted)

    def take(self, record: events.Step) -> None:
        """Add what a record says; numbers that are not finite are left out."""
        values = (record.gradient_norm, record.learning_rate, record.tokens_per_second)
        for history, value in zip(self.histories(), values, strict=True):
            if value is not None and math.isfinite(value):
                history.add(record.step, value)

    def curves(self, recent: bool = False) -> SeriesCurves:
        """All of the run, or its newest records."""
        return SeriesCurves(*(h.recent() if recent else h.whole() for h in self.histories()))


class GaugeHistory(_Histories):
    """Bytes in use, for the small histories next to the gauges."""

    allocated: History = msgspec.field(default_factory=_one_row)
    device: History = msgspec.field(default_factory=_one_row)
    host: History = msgspec.field(default_factory=_one_row)

    def take(self, record: events.Memory) -> None:
        """Add a reading. The allocated value is the peak since the last reading, if it is known."""
        allocated = [n for n in (record.allocated_bytes, record.peak_bytes) if n is not None]
        values = (max(allocated, default=None), record.device_bytes, record.host_bytes)
        for history, value in zip(self.histories(), values, strict=True):
            if value is not None:
                history.add_highest(record.step, float(value))

    def curves(self) -> GaugeCurves:
        return GaugeCurves(*(history.whole() for history in self.histories()))
