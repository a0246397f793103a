"""Divides windows into train rows, held-out trajectories and systems that are never trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memconsole_trainer.data.sources.split import hashed
from memconsole_trainer.data.windows.file import SCAN, WindowFile

TRAIN, HELD, UNSEEN = 0, 1, 2
"""Sides of the split: train rows, trajectories of the same families, families held out whole."""
UNSEEN_SHARE = 0.1
"""Share of the families that is held out whole."""
FEWEST_FAMILIES = 5
"""With fewer families, no family is held out."""


class WindowSplit:
    """Holds out whole families and whole groups of rows, by hashes of their names and numbers,
    independent of seed and order.

    If the hashes leave a side empty, the group of the last row that is not of a family held out whole goes to
    that side. A single group is trained on.
    """

    def __init__(self, file: WindowFile, fraction: float, tick: Callable[[], None]) -> None:
        self._file, self._limit = file, np.uint64(int(fraction * 2**64))
        self._forced: tuple[int, bool] | None = None
        self.unseen = unseen_families(file.families) if fraction else frozenset()
        """Places in `WindowFile.families` of the families held out whole."""
        self._count(tick)
        if not self.train_rows:  # the file holds rows of these families only
            self.unseen = frozenset()
            self._count(tick)
        if fraction and not (self.train_rows and self.held_rows):
            last = self._last_group()
            self._forced = (last, not self.held_rows)
            self._count(tick)
            if not self.train_rows:  # of one group alone
                self._forced = (last, False)
                self._count(tick)

    def sides(self, start: int, stop: int) -> NDArray[np.int8]:
        """The side of each of the rows `start` to `stop`."""
        groups = self._file.groups(start, stop)
        held = hashed(groups.astype(np.uint64)) < self._limit
        if self._forced is not None:
            held[groups == self._forced[0]] = self._forced[1]
        sides = np.where(held, HELD, TRAIN).astype(np.int8)
        if self.unseen:
            sides[np.isin(self._file.family_numbers(start, stop), list(self.unseen))] = UNSEEN
        return sides

    def _last_group(self) -> int:
        """The group of the last row that is trained on or held out with its group."""
        for start in reversed(range(0, self._file.count, SCAN)):
            stop = min(start + SCAN, self._file.count)
            known = np.flatnonzero(self.sides(start, stop) != UNSEEN)
            if len(known):
                return int(self._file.groups(start, stop)[known[-1]])
        raise ValueError("all rows are of families held out whole")

    def _count(self, tick: Callable[[], None]) -> None:
        counts = np.zeros(3, np.int64)
        for start in range(0, self._file.count, SCAN):
            sides = self.sides(start, min(start + SCAN, self._file.count))
            counts += np.bincount(sides, minlength=3)
            tick()
        self.train_rows, self.held_rows, self.unseen_rows = map(int, counts)


def unseen_families(names: tuple[str, ...]) -> frozenset[int]:
    """Places of the families that are held out whole: those with the lowest hashes."""
    if len(names) < FEWEST_FAMILIES:
        return frozenset()
    order = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    return frozenset(order[: max(1, round(UNSEEN_SHARE * len(names)))])
