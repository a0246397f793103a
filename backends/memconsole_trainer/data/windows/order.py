"""The train rows of an epoch: blocks in random order, read whole, and shuffled in a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from memconsole_trainer.data.windows.file import WindowFile, Windows
from memconsole_trainer.data.windows.split import TRAIN, WindowSplit
from memconsole_trainer.randomness import generator


@dataclass(slots=True)
class Row:
    """A row, still in the buffer that holds it."""

    buffer: Windows
    number: int


def gathered(rows: list[Row]) -> Windows:
    """Copy rows out of their buffers, in order."""
    parts = []
    for _, group in groupby(rows, key=lambda row: id(row.buffer)):
        together = list(group)
        numbers = np.fromiter((row.number for row in together), np.int64, len(together))
        parts.append(together[0].buffer.take(numbers))
    return parts[0] if len(parts) == 1 else Windows.joined(parts)


class WindowOrder:
    """The train rows of one epoch. Its state is the number of the buffer and of the row in it, so
    resuming reads one buffer.

    A buffer holds as many whole blocks as fit into `shuffle_buffer` rows, at least one. Blocks are
    whole chunks of the file: a chunk is decompressed once in an epoch.

    Only one buffer exists at a time. The rows given since the last `get_state` are copied out of it before the next one
    is read; no earlier row may be used then.
    """

    def __init__(
        self, file: WindowFile, split: WindowSplit, seed: int, epoch: int, shuffle_buffer: int
    ) -> None:
        self._file, self._split, self._seed, self._epoch = file, split, seed, epoch
        starts = np.arange(0, file.count, file.block_rows)
        self._starts = generator(seed, f"windows/{epoch}").permutation(starts)
        self._blocks = max(1, shuffle_buffer // file.block_rows)
        self._buffer, self._row = 0, 0
        self._rows: Windows | None = None
        self._order: list[int] = []
        self._given: list[Row] = []
        """The rows yielded since the last `get_state`."""

    def __iter__(self) -> WindowOrder:
        return self

    def __next__(self) -> Row:
        while self._rows is None or self._row >= len(self._order):
            if self._rows is not None:
                self._copy_out(self._rows)
                self._buffer, self._row, self._rows = self._buffer + 1, 0, None
            if self._buffer * self._blocks >= len(self._starts):
                raise StopIteration
            self._fill()
        row = Row(self._rows, self._order[self._row])
        self._row += 1
        self._given.append(row)
        return row

    def get_state(self) -> list[int]:
        self._given = []
        return [self._buffer, self._row]

    def set_state(self, state: list[int]) -> None:
        self._buffer, self._row = state
        self._rows, self._given = None, []

    def _copy_out(self, buffer: Windows) -> None:
        """Copy the rows that may still be wanted out of a buffer."""
        wanted = [row for row in self._given if row.buffer is buffer]
        copies = buffer.take(np.fromiter((row.number for row in wanted), np.int64, len(wanted)))
        for number, row in enumerate(wanted):
            row.buffer, row.number = copies, number

    def _fill(self) -> None:
        """Read the current buffer's blocks, and shuffle the numbers of its train rows."""
        file, first = self._file, self._buffer * self._blocks
        spans = [
            (start, min(start + file.block_rows, file.count))
            for start in sorted(map(int, self._starts[first : first + self._blocks]))
        ]
        rows = file.empty(sum(stop - start for start, stop in spans))
        kept, at = [], 0
        for start, stop in spans:
            trained = np.flatnonzero(self._split.sides(start, stop) == TRAIN)
            if len(trained):
                file.read_into(start, stop, rows, at)
                kept.append(at + trained)
                at += stop - start
        numbers = np.concatenate([np.zeros(0, np.int64), *kept])
        random = generator(self._seed, f"windows/{self._epoch}/{self._buffer}")
        self._rows, self._order = rows, random.permutation(numbers).tolist()
