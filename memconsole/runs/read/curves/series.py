"""What steps log besides their loss, over a whole run: gradient norm, learning rate and speed."""

from __future__ import annotations

import math

import msgspec

from memconsole.runs.read.curves.curve import SeriesCurves
from memconsole.runs.read.curves.history import History
from memconsole.runs.record import events

RECENT_POINTS = 200
BUCKETS = 127


def _history() -> History:
    return History(most_recent=RECENT_POINTS, most_buckets=BUCKETS)


class StepSeries(msgspec.Struct):
    """Values by step, decimated. Steps of a resumed attempt replace the steps it repeats."""

    gradient_norm: History = msgspec.field(default_factory=_history)
    learning_rate: History = msgspec.field(default_factory=_history)
    units_per_second: History = msgspec.field(default_factory=_history)

    def take(self, record: events.Step) -> None:
        """Add what a record says; numbers that are not finite are left out."""
        for history, value in (
            (self.gradient_norm, record.gradient_norm),
            (self.learning_rate, record.learning_rate),
            (self.units_per_second, record.tokens_per_second),
        ):
            if value is not None and math.isfinite(value):
                history.add(record.step, value)

    def truncate(self, step: int) -> None:
        """Drop the values after `step`."""
        for history in (self.gradient_norm, self.learning_rate, self.units_per_second):
            history.truncate(step)

    def curves(self, recent: bool = False) -> SeriesCurves:
        """All of the run, or its newest records."""
        found = (self.gradient_norm, self.learning_rate, self.units_per_second)
        return SeriesCurves(*(one.recent() if recent else one.whole() for one in found))
