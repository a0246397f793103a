"""Decides which documents are held out for validation, by a fixed function of their number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.sections.data import HeldOut
from memconsole_trainer.data.sources.documents import FileDocuments

_KEY = 0x6D656D636F6E736F
_SCAN = 1 << 20


class Split:
    """Documents whose hash falls below `fraction` are held out, independent of seed and order.

    With `files` (count,), the file number of each document, whole files are held out by the hash of
    their number. A single file is split by document.

    If `count` is known and at least two, at least one document is held out and at least one is not,
    unless `fraction` is 0.
    """

    def __init__(
        self, count: int | None, fraction: float, files: NDArray[np.int64] | None = None
    ) -> None:
        self.fraction = fraction
        self._files = None if files is None or len(files) == 0 or files[-1] == 0 else files
        self.count = count if self._files is None else int(self._files[-1]) + 1
        """Number of units that are split: documents or files."""
        self._forced: tuple[int, bool] | None = None
        if self.count is not None and self.count >= 2 and fraction > 0.0:
            self._force(self.count)

    def _force(self, count: int) -> None:
        """Move one unit to the other side if the hashes alone would leave a side empty."""
        lowest, highest = [], []
        for start in range(0, count, _SCAN):
            values = _hash(start, min(start + _SCAN, count))
            lowest.append((int(values.min()), start + int(values.argmin())))
            highest.append((int(values.max()), start + int(values.argmax())))
            if self._below(min(lowest)[0]) and not self._below(max(highest)[0]):
                return
        held = not self._below(min(lowest)[0])
        if self._files is None:
            self._forced = ((min(lowest) if held else max(highest))[1], held)
            return
        # Files differ in size: take the one whose size is closest to the requested share.
        pieces = np.bincount(self._files)
        wanted = (self.fraction if held else 1.0 - self.fraction) * len(self._files)
        order = np.lexsort((_hash(0, count), np.abs(pieces - wanted)))
        self._forced = (int(order[0]), held)

    def held_out(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Whether each of the documents `start` to `stop` is held out."""
        if self._files is None:
            return self._held_out(start, stop)
        numbers = self._files[start:stop]
        if len(numbers) == 0:
            return np.zeros(0, dtype=np.bool_)
        first = int(numbers[0])
        whole = self._held_out(first, int(numbers[-1]) + 1)
        mask: NDArray[np.bool_] = whole[numbers - first]
        return mask

    def numbers(self, count: int, *, held: bool) -> NDArray[np.int64]:
        """The rising numbers of those of the first `count` documents that are held out, or of the others."""
        starts = range(0, count, _SCAN)
        parts = [
            start + np.flatnonzero(self.held_out(start, min(start + _SCAN, count)) == held)
            for start in starts
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _held_out(self, start: int, stop: int) -> NDArray[np.bool_]:
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


class Everything(Split):
    """Holds out all documents, for a source that is only used for validation."""

    def __init__(self, count: int | None) -> None:
        super().__init__(count, 0.0)
        self.fraction = 1.0

    def held_out(self, start: int, stop: int) -> NDArray[np.bool_]:
        return np.ones(stop - start, dtype=np.bool_)


class Last(Split):
    """Holds out the last documents: the last `fraction` of the `sizes` (count,) of all, or of their number. At least
    one document is held out and at least one is not, if there are two."""

    def __init__(self, count: int, fraction: float, sizes: NDArray[np.int64] | None = None) -> None:
        super().__init__(count, 0.0)
        self.fraction = fraction
        self.first = count
        if fraction > 0.0 and count >= 2:
            each = np.ones(count, np.int64) if sizes is None else sizes
            middles = np.cumsum(each) - each / 2
            first = int(np.searchsorted(middles, (1.0 - fraction) * each.sum()))
            self.first = min(max(first, 1), count - 1)

    def held_out(self, start: int, stop: int) -> NDArray[np.bool_]:
        return np.arange(start, stop) >= self.first


def split_of(source: Any, fraction: float, held_out: HeldOut = "spread") -> Split:
    """The split of a source of documents or token rows. The last documents can be held out only if the source is not a
    stream."""
    if held_out == "last" and source.count is not None:
        return Last(source.count, fraction, getattr(source, "sizes", None))
    files = source.files if isinstance(source, FileDocuments) else None
    return Split(source.count, fraction, files)


def _hash(start: int, stop: int) -> NDArray[np.uint64]:
    return hashed(np.arange(start, stop, dtype=np.uint64))


def hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of each number, as uniform 64-bit
    integers."""
    with np.errstate(over="ignore"):
        z = numbers + np.uint64(_KEY)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
