"""Histories of items by user: split in time, cut into rows, and put in batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.plan import Plan
from memconsole.plan.tasks.recommendation import PADDING
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.engine import Batch
from memconsole_trainer.randomness import generator

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
SHORTEST = 3
"""Users with fewer interactions have none held out."""


class Histories:
    """The items of all users, one after another, each user's in the order of time.

    The last items of each user are held out. They are never inputs or targets of training.
    """

    def __init__(self, users: Int64, items: Int32, fraction: float) -> None:
        """`users` are sorted. Of each user's n items, round(fraction · n) are held out, but at least one."""
        self.items = items
        first = np.flatnonzero(np.diff(users, prepend=users[0] - 1))
        self.starts = first.astype(np.int64)
        self.ends = np.append(first[1:], len(users)).astype(np.int64)
        lengths = self.ends - self.starts
        held = np.maximum(1, np.rint(fraction * lengths)).astype(np.int64)
        held = np.where((lengths >= SHORTEST) & (fraction > 0), np.minimum(held, lengths - 2), 0)
        self.train_ends = self.ends - held

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def held_out(self) -> int:
        """Number of held-out items."""
        return int((self.ends - self.train_ends).sum())

    def train_rows(self, length: int, stride: int) -> Int64:
        """Beginning and end of each row of training (rows, 2), at most length + 1 items."""
        windows = np.maximum(0, -(-(self.train_ends - self.starts - 1) // stride))
        owner = np.repeat(np.arange(len(self)), windows)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(windows) - windows, windows)
        begin = self.starts[owner] + number * stride
        return np.stack([begin, np.minimum(begin + length + 1, self.train_ends[owner])], axis=1)

    def held_rows(self, length: int) -> Int64:
        """Beginning, first target and end of each row of evaluation (rows, 3), at most length + 1 items. Every held-out
        item is a target once; a row has at most length // 2 targets, so that half of it or more is context."""
        most = max(1, length // 2)
        rows = -(-(self.ends - self.train_ends) // most)
        owner = np.repeat(np.arange(len(self)), rows)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(rows) - rows, rows)
        first = self.train_ends[owner] + number * most
        end = np.minimum(first + most, self.ends[owner])
        return np.stack([np.maximum(self.starts[owner], end - length - 1), first, end], axis=1)

    def train_items(self) -> tuple[Int64, Int32]:
        """Number of the user and item of every interaction of training."""
        lengths = self.train_ends - self.starts
        place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        owner = np.repeat(np.arange(len(self)), lengths)
        return owner, self.items[self.starts[owner] + place]


class HistoryRows:
    """The training rows. Implements `memconsole_trainer.data.stream.Rows`."""

    shuffle_buffer = 0
    at_hand = True

    def __init__(self, plan: Plan, histories: Histories) -> None:
        self._seed, self._histories = plan.train.seed, histories
        self.bounds = histories.train_rows(plan.data.sequence_length, plan.stride)
        self.row_bytes = 4 * (plan.data.sequence_length + 1)

    def epoch(self, epoch: int) -> RowOrder:
        order = generator(self._seed, f"histories/{epoch}").permutation(len(self.bounds))
        return RowOrder(self._histories.items, self.bounds[order])

    def after(self, iterator: object) -> None:
        return None

    def join(self, rows: list[Int32]) -> list[Int32]:
        return rows

    def batch(self, joined: list[Int32], shape: BatchShape) -> tuple[Batch, int]:
        made = batch_of([(row, 1) for row in joined], shape)
        return made, int(made.weight)


class RowOrder:
    """The rows of one epoch. The state is the number of rows so far."""

    def __init__(self, items: Int32, bounds: Int64) -> None:
        self._items, self._bounds, self._next = items, bounds, 0

    def __iter__(self) -> Iterator[Int32]:
        return self

    def __next__(self) -> Int32:
        if self._next >= len(self._bounds):
            raise StopIteration
        begin, end = self._bounds[self._next]
        self._next += 1
        return self._items[begin:end]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


def batch_of(rows: list[tuple[Int32, int]], shape: BatchShape) -> Batch:
    """A batch of rows (≤ rows, ≤ sequence_length + 1). Each row is given with the place of the first item that
    counts as a target."""
    length = shape.sequence_length
    items = np.full((shape.rows, length), PADDING, np.int32)
    targets = np.full((shape.rows, length), PADDING, np.int32)
    for number, (row, first) in enumerate(rows):
        items[number, : len(row) - 1] = row[:-1]
        targets[number, first - 1 : len(row) - 1] = row[first:]
    axes = shape.micro_batches, shape.micro_batch, length
    arrays = {"items": items.reshape(axes), "targets": targets.reshape(axes)}
    return Batch(arrays, float(np.count_nonzero(targets != PADDING)))
