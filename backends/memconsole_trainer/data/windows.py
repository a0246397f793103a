"""HDF5 windows for regression: read in blocks, split by trajectory, shuffled in a buffer.

A file holds `input_sequences` (rows, length, features), `controls` (rows, outputs) and
`control_masks` (rows, outputs) as floats. It may hold `trajectory_ids` (rows,). Windows of one
trajectory overlap, so whole trajectories are held out. Without ids, groups of neighbouring rows are
held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.plan import PlanError
from memconsole.plan.tasks.regression import DATASETS
from memconsole_trainer.data.documents import DataError
from memconsole_trainer.data.hashes import DataHashes
from memconsole_trainer.data.hdf5 import Hdf5Dataset, describe
from memconsole_trainer.data.split import hashed
from memconsole_trainer.randomness import generator

TRAJECTORIES = "trajectory_ids"
NEIGHBOURS = 4096
"""Most rows of a group that is held out together in a file without trajectory ids."""
_SCAN = 1 << 20
Floats = NDArray[np.float32]


class Windows(NamedTuple):
    """Rows of a file: windows (n, length, features), targets (n, outputs) and their mask (n,
    outputs)."""

    windows: Floats
    targets: Floats
    mask: Floats

    def take(self, wanted: NDArray[Any]) -> Windows:
        return Windows(self.windows[wanted], self.targets[wanted], self.mask[wanted])


class WindowFile:
    """One file of windows. Only the last `length` steps of each window are used."""

    def __init__(
        self, path: Path, features: int, outputs: int, length: int, max_examples: int | None
    ) -> None:
        """Raises `PlanError` if the file does not fit the model, `DataError` if it is damaged."""
        self.path, self._length = path, length
        found = {line.partition(" ")[0] for line in describe(path)}
        missing = [name for name in DATASETS if name not in found]
        if missing:
            raise PlanError(
                f"{path}: lacks {', '.join(missing)}; the file holds "
                f"{', '.join(describe(path)) or 'no datasets'}",
                "data.source",
            )
        # Rows are read together, so that all datasets are hashed in blocks of the same rows.
        first = Hdf5Dataset(path, DATASETS[0], max_examples)
        rows = first.block_size
        self._parts = [
            first,
            *(Hdf5Dataset(path, name, max_examples, rows) for name in DATASETS[1:]),
        ]
        shapes = [part.shape for part in self._parts]
        width = shapes[0][1] if len(shapes[0]) == 3 else 0
        for name, shape, row in zip(
            DATASETS, shapes, ((width, features), (outputs,), (outputs,)), strict=True
        ):
            if shape[1:] != row or shape[0] != shapes[0][0]:
                wanted = ("length", features) if name == DATASETS[0] else row
                raise PlanError(
                    f"{path}: {name} has shape {shape}; expected ({shapes[0][0]:,}, "
                    f"{', '.join(map(str, wanted))}) for this model",
                    "data.source",
                )
        if width < length:
            raise PlanError(
                f"data.sequence_length = {length:,}: the windows of {path} hold {width:,} steps; "
                f"expected at most {width:,}",
                "data.sequence_length",
            )
        self.count = self._parts[0].count or 0
        if not self.count:
            raise DataError(f"{path}: holds no windows")
        self.block_rows = self._parts[0].block_size
        self._ids = None
        if TRAJECTORIES in found:
            self._ids = Hdf5Dataset(path, TRAJECTORIES, max_examples, _SCAN)
        if self._ids is not None and self._ids.shape != shapes[0][:1]:
            raise PlanError(
                f"{path}: {TRAJECTORIES} has shape {self._ids.shape}; expected ({shapes[0][0]:,},)",
                "data.source",
            )
        digest = hashlib.sha256()
        for part in (*self._parts, *([self._ids] if self._ids else [])):
            digest.update(part.fingerprint.encode())
        self.fingerprint = digest.hexdigest()
        read = {
            part.name: part.blocks for part in (*self._parts, *([self._ids] if self._ids else []))
        }
        self.hashes = DataHashes([path], read)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        features, outputs = self._parts[0].shape[2], self._parts[1].shape[1]
        return 4 * (self._length * features + 2 * outputs)

    def read(self, start: int, stop: int) -> Windows:
        """Read rows `start` to `stop`. If a number is not finite, raises `DataError` with the file
        and row."""
        parts = [part.read_rows(start, stop).astype(np.float32) for part in self._parts]
        for name, values in zip(DATASETS, parts, strict=True):
            if not np.isfinite(values).all():
                row = int(np.argwhere(~np.isfinite(values.reshape(len(values), -1)).all(1))[0, 0])
                raise DataError(
                    f"{self.path}: row {start + row:,} of {name} holds a number that is not finite"
                )
        return Windows(parts[0][:, -self._length :], parts[1], parts[2])

    def groups(self, start: int, stop: int) -> NDArray[np.int64]:
        """Group number of each row for the split: its trajectory, or its group of neighbours."""
        if self._ids is not None:
            return self._ids.read_rows(start, stop).astype(np.int64)
        run = max(1, min(NEIGHBOURS, self.count // 64))
        return np.arange(start, stop, dtype=np.int64) // run


class WindowSplit:
    """Holds out whole groups of rows by a hash of their number, independent of seed and order.

    If the hashes leave a side empty, the group of the last row goes to that side. A single group is trained on.
    """

    def __init__(self, file: WindowFile, fraction: float, tick: Callable[[], None]) -> None:
        self._file, self._limit = file, np.uint64(int(fraction * 2**64))
        self._forced: tuple[int, bool] | None = None
        self.train_rows, self.held_rows = self._count(tick)
        last = int(file.groups(file.count - 1, file.count)[0])
        if fraction and not (self.train_rows and self.held_rows):
            self._forced = (last, not self.held_rows)
            self.train_rows, self.held_rows = self._count(tick)
        if not self.train_rows:  # of one group alone
            self._forced = (last, False)
            self.train_rows, self.held_rows = self._count(tick)

    def held_out(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Whether each of the rows `start` to `stop` is held out."""
        groups = self._file.groups(start, stop)
        held: NDArray[np.bool_] = hashed(groups.astype(np.uint64)) < self._limit
        if self._forced is not None:
            held[groups == self._forced[0]] = self._forced[1]
        return held

    def _count(self, tick: Callable[[], None]) -> tuple[int, int]:
        held = 0
        for start in range(0, self._file.count, _SCAN):
            held += int(self.held_out(start, min(start + _SCAN, self._file.count)).sum())
            tick()
        return self._file.count - held, held


def blocks(file: WindowFile) -> Iterator[tuple[int, int]]:
    """Yield start and stop of every block of the file, in order."""
    for start in range(0, file.count, file.block_rows):
        yield start, min(start + file.block_rows, file.count)


class WindowOrder:
    """The train rows of one epoch: blocks in random order, and rows shuffled within a buffer of
    blocks.

    The state is the number of the buffer and of the row in it. Resuming reads one buffer.
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

    def __iter__(self) -> WindowOrder:
        return self

    def __next__(self) -> Windows:
        """Return one row: (1, …) of each array."""
        while True:
            if self._rows is None:
                if self._buffer * self._blocks >= len(self._starts):
                    raise StopIteration
                self._rows = self._filled()
            if self._row < len(self._rows.targets):
                row = slice(self._row, self._row + 1)
                self._row += 1
                return Windows(*(part[row] for part in self._rows))
            self._buffer, self._row, self._rows = self._buffer + 1, 0, None

    def get_state(self) -> list[int]:
        return [self._buffer, self._row]

    def set_state(self, state: list[int]) -> None:
        self._buffer, self._row = state
        self._rows = None

    def _filled(self) -> Windows:
        """Read the train rows of the current buffer's blocks, shuffled."""
        first = self._buffer * self._blocks
        parts = []
        for start in sorted(map(int, self._starts[first : first + self._blocks])):
            stop = min(start + self._file.block_rows, self._file.count)
            kept = ~self._split.held_out(start, stop)
            if kept.any():
                parts.append(self._file.read(start, stop).take(kept))
        if not parts:
            return self._file.read(0, 1).take(np.zeros(0, np.int64))
        whole = Windows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        order = generator(self._seed, f"windows/{self._epoch}/{self._buffer}")
        return whole.take(order.permutation(len(whole.targets)))
