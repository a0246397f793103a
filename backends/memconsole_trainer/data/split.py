"""Which documents are held out for validation: a fixed function of a document's number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_KEY = 0x6D656D636F6E736F
_SCAN = 1 << 20


class Split:
    """Documents whose hash falls below `fraction` are held out, whatever the seed and the order.

    Of a known `count` of at least two documents at least one is held out and at least one is not,
    unless `fraction` is 0.
    """

    def __init__(self, count: int | None, fraction: float) -> None:
        self.count = count
        self.fraction = fraction
        self._forced: tuple[int, bool] | None = None
        if count is None or count < 2 or fraction == 0.0:
            return
        lowest, highest = [], []
        for start in range(0, count, _SCAN):
            values = _hash(start, min(start + _SCAN, count))
            lowest.append((int(values.min()), start + int(values.argmin())))
            highest.append((int(values.max()), start + int(values.argmax())))
            if self._below(min(lowest)[0]) and not self._below(max(highest)[0]):
                return
        if not self._below(min(lowest)[0]):
            self._forced = (min(lowest)[1], True)
        else:
            self._forced = (max(highest)[1], False)

    def held_out(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Whether each of the documents `start` to `stop` is held out."""
        if self.fraction == 0.0 or (self.count is not None and self.count < 2):
            return np.zeros(stop - start, dtype=np.bool_)
        mask = _hash(start, stop) < np.uint64(self._limit())
        if self._forced is not None and start <= self._forced[0] < stop:
            mask[self._forced[0] - start] = self._forced[1]
        return mask

    def _limit(self) -> int:
        return int(self.fraction * 2**64)

    def _below(self, value: int) -> bool:
        return value < self._limit()


def _hash(start: int, stop: int) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of each number, as uniform 64-bit integers."""
    with np.errstate(over="ignore"):
        z = np.arange(start, stop, dtype=np.uint64) + np.uint64(_KEY)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
