"""A file of HDF5 windows for regression: its datasets, checked, and its rows.

A file holds `input_sequences` (rows, length, features) and `controls` (rows, outputs) as numbers. It may hold
`control_masks` (rows, outputs), which say how much each output counts, from 0 to 1; `trajectory_ids` (rows,); and
`system_ids` (rows,) or `variant_ids` (rows,), which say of which family of systems a window is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.catalog.windows import DATASETS, too_long
from memconsole.plan.plan import PlanError
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.hashes import DataHashes
from memconsole_trainer.data.sources.hdf5 import Hdf5Dataset, describe
from memconsole_trainer.data.spread import spread_order
from memconsole_trainer.data.windows.column_names import ColumnNames, read_names
from memconsole_trainer.data.windows.standardization import Standardization
from memconsole_trainer.data.windows.systems import (
    StoredFamily,
    family_names,
    normalization,
    output_scales,
    process_noise,
    read_systems,
)
from memconsole_trainer.host import mapped

TRAJECTORIES, VARIANTS, SYSTEMS = "trajectory_ids", "variant_ids", "system_ids"
MASK = DATASETS[2]
NEIGHBOURS = 4096
"""Most rows of a group that is held out together in a file without trajectory ids."""
SCAN = 1 << 16
"""Rows that are read together where only their numbers are wanted."""
Floats = NDArray[np.float32]


class Windows(NamedTuple):
    """Rows of a file: windows (n, length, features), targets (n, outputs) and their mask (n,
    outputs)."""

    windows: Floats
    targets: Floats
    mask: Floats

    def take(self, wanted: NDArray[Any]) -> Windows:
        """The rows of these numbers."""
        rows = (mapped.empty((len(wanted), *part.shape[1:]), part.dtype) for part in self)
        return Windows(
            *(np.take(part, wanted, axis=0, out=out) for part, out in zip(self, rows, strict=True))
        )

    @classmethod
    def joined(cls, parts: list[Windows]) -> Windows:
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class WindowFile:
    """One file of windows. Only the last `length` steps of each window are used. With `datasets` it
    needs to hold only the first ones of `DATASETS`; the parts of `Windows` that it lacks are zero. Without a
    mask every output counts."""

    def __init__(
        self,
        path: Path,
        features: int,
        outputs: int,
        length: int,
        max_examples: int | None,
        datasets: Sequence[str] = DATASETS,
    ) -> None:
        """Raises `PlanError` if the file does not fit the model, `DataError` if it is damaged."""
        self.path, self.length = path, length
        self.standardization: Standardization | None = None
        """What the numbers are standardized with when they are read; set once it is known."""
        self.features, self.outputs = features, outputs
        lines = describe(path)
        found = {line.partition(" ")[0] for line in lines}
        missing = [name for name in datasets if name not in found and name != MASK]
        if missing:
            lines = [line for line in lines if "/" not in line.partition(" ")[0]]
            raise PlanError(
                f"{path}: lacks {', '.join(missing)}; the file holds {', '.join(lines) or 'no datasets'}",
                "data.source",
            )
        # Rows are read together, so that all datasets are hashed in blocks of the same rows.
        first = Hdf5Dataset(path, DATASETS[0], max_examples)
        self._parts = [
            first,
            *(
                Hdf5Dataset(path, name, max_examples, first.block_size)
                for name in datasets[1:]
                if name in found
            ),
        ]
        rows = first.shape[0]
        self._check_shapes(length)
        for part in self._parts:
            self._check_kind(part)
        self.count = self._parts[0].count or 0
        if not self.count:
            raise DataError(f"{path}: holds no windows")
        self.block_rows = self._parts[0].block_size
        optional: dict[str, Hdf5Dataset | None] = {}
        for name in (TRAJECTORIES, VARIANTS, SYSTEMS):
            optional[name] = Hdf5Dataset(path, name, max_examples, SCAN) if name in found else None
            self._check_numbers(optional[name], rows)
        self._ids, variants, self._names = optional.values()
        self.systems: list[StoredFamily] = self._parts[0].of_file(read_systems)
        """The systems that the file holds; empty if it holds only windows."""
        self.noise: float = self._parts[0].of_file(process_noise)
        """Process noise of a step, as a share of the states' range."""
        self.columns: ColumnNames = self._parts[0].of_file(read_names)
        """The names of features and outputs, if the file was cut from a table."""
        self._variants = variants if self.systems else None
        self.families: tuple[str, ...] = self._family_names()
        """Names of the families; empty if the file does not say to which a row belongs."""
        everything = [*self._parts, *(part for part in optional.values() if part is not None)]
        digest = hashlib.sha256()
        for part in everything:
            digest.update(part.fingerprint.encode())
        self.fingerprint = digest.hexdigest()
        self.hashes = DataHashes([path], {part.name: part.block_hashes for part in everything})

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return 4 * (self.length * self.features + 2 * self.outputs)

    @property
    def has_mask(self) -> bool:
        """Whether the file says which outputs count."""
        return self._parts[-1].name == MASK

    @property
    def _learns(self) -> bool:
        """Whether the outputs are read too."""
        return len(self._parts) > 1

    @property
    def has_trajectories(self) -> bool:
        """Whether the file says which windows belong together."""
        return self._ids is not None

    def empty(self, rows: int) -> Windows:
        """Room for `rows` rows."""
        return Windows(
            mapped.empty((rows, self.length, self.features), np.float32),
            mapped.empty((rows, self.outputs), np.float32),
            mapped.empty((rows, self.outputs), np.float32),
        )

    def read(self, start: int, stop: int) -> Windows:
        """Read rows `start` to `stop`. Raises `DataError` with file and row if a number is not finite, or if a number
        of a mask is not between 0 and 1."""
        found = self.empty(stop - start)
        self.read_into(start, stop, found, 0)
        return found

    def read_into(self, start: int, stop: int, into: Windows, at: int) -> None:
        """Read rows `start` to `stop` to rows `at` and following of `into`. Raises what `read`
        raises."""
        for part, values in zip(self._parts, into, strict=False):
            own = values[at : at + stop - start]
            with np.errstate(over="ignore"):  # a number too large for float32 is found below
                part.read_into(start, stop, own, self.length if part is self._parts[0] else None)
        rows = Windows(*(values[at : at + stop - start] for values in into))
        if self._learns:
            if not self.has_mask:
                rows.mask.fill(1)
            elif rows.mask.size and not (rows.mask.min() >= 0 and rows.mask.max() <= 1):
                wrong = ~((rows.mask >= 0) & (rows.mask <= 1)).all(1)
                self._refuse(start + int(wrong.argmax()), MASK, "that is not from 0 to 1")
            rows.targets[rows.mask == 0] = 0  # what does not count may be anything, also NaN
        for name, numbers in zip(DATASETS, rows[:2], strict=False):
            # A sum takes no memory. It is not finite if a number is not, or if it overflows; only then are
            # the numbers checked one by one.
            with np.errstate(over="ignore", invalid="ignore"):
                total = numbers.sum()
            if not np.isfinite(total):
                wrong = ~np.isfinite(numbers.reshape(len(numbers), -1)).all(1)
                if wrong.any():
                    where = (
                        f", and {MASK} counts it" if name == DATASETS[1] and self.has_mask else ""
                    )
                    self._refuse(start + int(wrong.argmax()), name, f"that is not finite{where}")

        if self.standardization is not None:
            self.standardization.standardize_windows(rows.windows)
            if self._learns:
                self.standardization.standardize_targets(rows.targets, rows.mask)

    def _refuse(self, row: int, name: str, why: str) -> NoReturn:
        raise DataError(f"{self.path}: row {row:,} of {name} holds a number {why}")

    def groups(self, start: int, stop: int) -> NDArray[np.int64]:
        """Group number of each row for the split: its trajectory, or its group of neighbours."""
        if self._ids is not None:
            return self._ids.read_rows(start, stop).astype(np.int64)
        run = max(1, min(NEIGHBOURS, self.count // 64))
        return np.arange(start, stop, dtype=np.int64) // run

    def family_numbers(self, start: int, stop: int) -> NDArray[np.int64]:
        """For each row the index of its family in `families`. Raises `DataError` for a row without a known
        family."""
        if self._variants is not None:
            firsts = [family.first for family in self.systems]
            values = self._variants.read_rows(start, stop)
            found = np.searchsorted(firsts, values, side="right") - 1
            last = self.systems[-1]
            wrong = (values < 0) | (values >= last.first + last.variants.count)
        else:
            assert self._names is not None
            values = self._names.read_rows(start, stop).astype("S")
            names = np.array([name.encode() for name in self.families])
            found = np.minimum(np.searchsorted(names, values), len(names) - 1)
            wrong = names[found] != values
        if wrong.any():
            row = int(wrong.argmax())
            name = VARIANTS if self._variants is not None else SYSTEMS
            raise DataError(
                f"{self.path}: row {start + row:,} of {name} is {values[row]}, which the file does not describe"
            )
        return found.astype(np.int64)

    @property
    def says_normalized(self) -> bool:
        """Whether the file says what its numbers were divided by."""
        return bool(self._parts[0].of_file(family_names))

    def output_scales(self) -> NDArray[np.float64] | None:
        """What the outputs of each of `families` were divided by (families, outputs), as
        `systems.output_scales`; None if the file does not say it. Raises `DataError`."""
        if not self.families:
            return None
        read = partial(output_scales, families=self.families, outputs=self.outputs)
        found: NDArray[np.float64] = self._parts[0].of_file(read)
        return found

    def normalization(self) -> dict[str, dict[str, list[float]]]:
        """See `systems.normalization`. Raises `DataError`."""
        found: dict[str, dict[str, list[float]]] = self._parts[0].of_file(normalization)
        return found

    def _family_names(self) -> tuple[str, ...]:
        if self._variants is not None:
            return tuple(family.variants.family for family in self.systems)
        if self._names is None:
            return ()
        if not self._names.is_text:
            raise PlanError(
                f"{self.path}: {SYSTEMS} holds {self._names.dtype}; expected strings, the names of systems",
                "data.source",
            )
        named: list[str] = self._parts[0].of_file(family_names)
        return tuple(sorted(named))

    def _check_shapes(self, length: int) -> None:
        shapes = {part.name: part.shape for part in self._parts}
        first = shapes[DATASETS[0]]
        width = first[1] if len(first) == 3 else 0
        targets = shapes.get(DATASETS[1], ())
        alike = width and len(targets) == 2 and targets == shapes.get(MASK, targets)
        if alike and (first[-1], targets[-1]) != (self.features, self.outputs):
            raise PlanError(
                f"{self.path}: holds windows of {first[-1]:,} features to {targets[-1]:,} outputs, the model has "
                f"{self.features:,} and {self.outputs:,}; set model.features = {first[-1]} and model.outputs = {targets[-1]}",
                "model.features",
            )
        for name, shape in shapes.items():
            row = (width, self.features) if name == DATASETS[0] else (self.outputs,)
            if shape[1:] != row or shape[0] != first[0]:
                wanted = ("length", self.features) if name == DATASETS[0] else row
                raise PlanError(
                    f"{self.path}: {name} has shape {shape}; expected ({first[0]:,}, "
                    f"{', '.join(map(str, wanted))}) for this model",
                    "data.source",
                )
        if width < length:
            raise too_long(self.path, length, width)

    def _check_kind(self, part: Hdf5Dataset) -> None:
        if part.kind not in "fiub":
            raise PlanError(
                f"{self.path}: {part.name} holds {part.dtype}; expected numbers",
                "data.source",
            )

    def _check_numbers(self, dataset: Hdf5Dataset | None, rows: int) -> None:
        """Raise `PlanError` unless the dataset has one number or name for each row."""
        if dataset is not None and dataset.shape != (rows,):
            raise PlanError(
                f"{self.path}: {dataset.name} has shape {dataset.shape}; expected ({rows:,},)",
                "data.source",
            )
        if dataset is not None and dataset.name != SYSTEMS and dataset.kind not in "iu":
            raise PlanError(
                f"{self.path}: {dataset.name} holds {dataset.dtype}; expected whole numbers",
                "data.source",
            )


def blocks(file: WindowFile) -> Iterator[tuple[int, int]]:
    """Yield start and stop of every block of the file. The first ones, however many, are spread over
    the file."""
    for block in spread_order(-(-file.count // file.block_rows)).tolist():
        start = block * file.block_rows
        yield start, min(start + file.block_rows, file.count)
