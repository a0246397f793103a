"""A curve of bounded size: the newest points unchanged, and the whole run decimated."""

from __future__ import annotations

import msgspec

from memconsole.runs.read.curves.curve import Curve

RECENT_POINTS = 1000
BUCKETS = 255
"""Two points per bucket and the newest one: at most 511 points for a whole run."""


class Bucket(msgspec.Struct, array_like=True):
    """The lowest and the highest point in one bucket of steps; both are points of the curve."""

    index: int
    low_step: int
    low: float
    high_step: int
    high: float

    def take(self, other: Bucket) -> None:
        if other.low < self.low:
            self.low_step, self.low = other.low_step, other.low
        if other.high > self.high:
            self.high_step, self.high = other.high_step, other.high


class History(msgspec.Struct):
    """Points (step, value) with ascending steps.

    A point at or before the newest step replaces everything from there on. This is how a resumed
    attempt replaces the steps that the interrupted one took after its checkpoint.
    """

    steps: list[int] = []
    values: list[float] = []
    buckets: list[Bucket] = []
    width: int = 1
    """Steps per bucket, a power of two."""
    most_recent: int = RECENT_POINTS
    most_buckets: int = BUCKETS

    def __post_init__(self) -> None:
        """Raise `ValueError` for a stored curve that no run can have."""
        if len(self.steps) != len(self.values):
            raise ValueError("as many steps as values are needed")
        if min(self.width, self.most_recent, self.most_buckets) < 1:
            raise ValueError("limits are at least 1")

    def add(self, step: int, value: float) -> None:
        if self.buckets and step <= self.last_step:
            self.truncate(step - 1)
        self.steps.append(step)
        self.values.append(value)
        slack = max(1, self.most_recent // 4)
        if len(self.steps) > self.most_recent + slack:
            del self.steps[:slack], self.values[:slack]
        point = Bucket(step // self.width, step, value, step, value)
        if self.buckets and self.buckets[-1].index == point.index:
            self.buckets[-1].take(point)
        else:
            self.buckets.append(point)
            while len(self.buckets) > self.most_buckets:
                self._halve()

    def add_highest(self, step: int, value: float) -> None:
        """Add a reading without removing earlier points. At the newest step the highest value
        stays.
        """
        if step <= self.last_step:
            step = self.last_step
            value = max([value, *self.values[-1:]])
        self.add(step, value)

    def truncate(self, step: int) -> None:
        """Drop every point after `step`."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()
        while self.buckets and min(self.buckets[-1].low_step, self.buckets[-1].high_step) > step:
            self.buckets.pop()
        if self.buckets:
            newest = self.buckets[-1]
            if newest.low_step > step:
                newest.low_step, newest.low = newest.high_step, newest.high
            if newest.high_step > step:
                newest.high_step, newest.high = newest.low_step, newest.low

    @property
    def last_step(self) -> int:
        """The newest step, or -1 if there is none."""
        if self.steps:
            return self.steps[-1]
        if self.buckets:
            return max(self.buckets[-1].low_step, self.buckets[-1].high_step)
        return -1

    def recent(self) -> Curve:
        newest = slice(-self.most_recent, None)
        return Curve(tuple(self.steps[newest]), tuple(self.values[newest]))

    def whole(self) -> Curve:
        points: dict[int, float] = {}
        for bucket in self.buckets:
            pair = ((bucket.low_step, bucket.low), (bucket.high_step, bucket.high))
            points.update(sorted(pair))
        if self.steps:
            points[self.steps[-1]] = self.values[-1]
        return Curve(tuple(points), tuple(points.values()))

    def _halve(self) -> None:
        self.width *= 2
        merged: list[Bucket] = []
        for bucket in self.buckets:
            bucket.index //= 2
            if merged and merged[-1].index == bucket.index:
                merged[-1].take(bucket)
            else:
                merged.append(bucket)
        self.buckets = merged
