"""Cuts the rows of a table into windows: a file that a regressor learns from.

The rows of a table are steps in time. A window is `length` of them in succession, with the columns of `inputs`; its target are
the columns of `outputs` in its last row, or `ahead` rows later. Windows begin every `stride` rows, and none reaches over
two groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from memconsole.plan.catalog.folders import TABLES, plain_suffix
from memconsole.plan.catalog.windows import DATASETS
from memconsole.plan.errors import quote
from memconsole.plan.plan import DataChoice, nearest
from memconsole_trainer.data.cutting.request import Cut
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.opening import open_table
from memconsole_trainer.data.sources.tables import TEXT_TYPES, column_types
from memconsole_trainer.data.windows.column_names import write_names
from memconsole_trainer.data.windows.file import MASK, TRAJECTORIES

BLOCK_BYTES, CHUNK_BYTES = 64 << 20, 2 << 20
"""Bytes of windows that are cut together, and of a chunk of the file."""
LEAST_ROWS = 256
"""The fewest rows of a table that are read together."""
LARGEST = float(np.finfo(np.float32).max)
Numbers = NDArray[np.float64]


class _Windows(NamedTuple):
    """Windows (n, length, inputs), targets and whether each is known (n, outputs), and the number of their group (n,)."""

    windows: NDArray[np.float32]
    targets: NDArray[np.float32]
    known: NDArray[np.float32]
    groups: NDArray[np.int64]

    def take(self, wanted: NDArray[np.bool_]) -> _Windows:
        return _Windows(
            self.windows[wanted], self.targets[wanted], self.known[wanted], self.groups[wanted]
        )


def cut(request: Cut, out: Path, bar: Bar) -> Facts:
    """Write the windows to `out` in constant memory. A window with a missing input or without a known output is left out; the
    other missing outputs do not count. Raises `DataError`."""
    import h5py

    table = _opened(request)
    series, left_out = _Series(request), 0
    with h5py.File(out, "w", libver="latest") as file:
        write_names(file, request.inputs, request.outputs)
        file.attrs.update(
            {
                "sequence_length": request.length,
                "sequence_stride": request.stride,
                "steps_ahead": request.ahead,
            }
        )
        writer = _Writer(file, request)
        for first, numbers, groups in _blocks(request, table):
            for found in series.add(first, numbers, groups):
                complete: NDArray[np.bool_] = np.all(np.isfinite(found.windows), (1, 2))
                if request.outputs:
                    complete &= found.known.any(1)
                left_out += int(np.count_nonzero(~complete))
                writer.write(found.take(complete))
            bar.at(first + len(numbers), len(table))
        count = writer.count
    if not count:
        raise DataError(_why_none(request, series, left_out))
    facts: dict[str, str | int | float] = {"windows": count, "steps": request.length}
    facts |= {"inputs": len(request.inputs), "outputs": len(request.outputs)}
    if request.group is not None:
        facts["groups"] = series.group + 1
    if left_out:
        facts["left_out"] = (
            f"{left_out:,} window{'s' if left_out != 1 else ''} with missing numbers"
        )
    return {**facts, "file_bytes": out.stat().st_size}


def _opened(request: Cut) -> Any:
    """The table with the columns of the request. Raises `DataError`."""
    kind = TABLES.get(plain_suffix(Path(request.table).name))
    if kind is None:
        allowed = ", ".join(TABLES)
        raise DataError(f"{request.table}: is no table; expected a name that ends with {allowed}")
    group = () if request.group is None else (request.group,)
    wanted = dict.fromkeys((*request.inputs, *request.outputs, *group))
    table = open_table(kind, [Path(request.table)], DataChoice(), used=wanted)
    types = column_types(table.features)
    for name in wanted:
        if name not in types:
            listed = ", ".join(types)
            raise DataError(
                f'{request.table}: no column "{name}"{nearest(name, types)}; it has {listed}'
            )
    return table.select_columns(list(wanted)).with_format("arrow")


def _blocks(request: Cut, table: Any) -> Iterator[tuple[int, Numbers, list[Any] | None]]:
    """The table's rows in parts: the number of the first row, the numbers (rows, inputs and outputs; NaN where one is
    missing), and each row's group."""
    size = 4 * request.length * len(request.inputs)
    rows = min(max(BLOCK_BYTES // size, LEAST_ROWS), 1 << 16)
    for first in range(0, len(table), rows):
        part = table[first : first + rows]
        names = (*request.inputs, *request.outputs)
        numbers = np.stack(
            [_numbers(part.column(n), f"{request.table}: column {quote(n)}", first) for n in names],
            1,
        )
        groups = None if request.group is None else part.column(request.group).to_pylist()
        yield first, numbers, groups


def _numbers(column: Any, where: str, first: int) -> Numbers:
    """The numbers of a column, NaN where one is missing. Raises `DataError`, which names the row."""
    import pyarrow as pa
    from pyarrow import compute

    kind = str(column.type)
    try:
        if kind in TEXT_TYPES:
            trimmed = compute.utf8_trim_whitespace(column)
            column = compute.if_else(compute.equal(trimmed, ""), None, trimmed)
        # Not safe: whole numbers above 2^53 are rounded.
        found = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
    except pa.ArrowInvalid:
        found = _cells(column.to_pylist(), where, first)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise DataError(f"{where} holds {kind}, expected numbers") from None
    large = np.flatnonzero(np.abs(found) > LARGEST)
    if len(large):
        row = int(large[0])
        raise DataError(
            f"{where} holds {found[row]:g} in row {first + row + 1:,}, which is too large for fp32"
        )
    return found


def _cells(cells: Sequence[str | None], where: str, first: int) -> Numbers:
    """The numbers of cells of text, which may have forms that Arrow does not read, such as `+1.5`. Raises `DataError`."""
    found = np.full(len(cells), np.nan)
    for row, cell in enumerate(cells):
        try:
            if cell is not None:
                found[row] = float(str(cell).replace("_", " _ "))  # Python alone takes 1_000
        except ValueError:
            raise DataError(
                f"{where} holds {quote(cell)} in row {first + row + 1:,}, expected a number"
            ) from None
    return found


class _Series:
    """Cuts the windows of one group after the other, and keeps the rows that the next windows begin with."""

    def __init__(self, request: Cut) -> None:
        self._request = request
        self.group = -1
        """The number of the present group."""
        self._name: Any = None
        self._seen = set[Any]()
        self._rest = np.empty((0, len(request.inputs) + len(request.outputs)))
        self._skipped = 0
        self._rows = self.longest = 0
        """The rows of the present group so far, and of the longest one."""

    def add(self, first: int, numbers: Numbers, groups: Sequence[Any] | None) -> Iterator[_Windows]:
        """The windows that end in these rows. Raises `DataError` if the rows of a group are not together."""
        if groups is None:
            groups = [0] * len(numbers)
        begin = 0
        while begin < len(numbers):
            end = begin + 1
            while end < len(groups) and groups[end] == groups[begin]:
                end += 1
            if self.group < 0 or groups[begin] != self._name:
                self._begin(groups[begin], first + begin)
            yield self._cut(numbers[begin:end])
            begin = end

    def _begin(self, name: Any, row: int) -> None:
        r = self._request
        if name is None and r.group is not None:
            raise DataError(f"{r.table}: row {row + 1:,} has no {r.group}")
        if name in self._seen:
            raise DataError(
                f"{r.table}: the rows with {r.group} = {quote(name)} are not together: row {row + 1:,} has it again; "
                f"sort the table by {r.group}"
            )
        self._seen.add(name)
        self.group, self._name = self.group + 1, name
        self._rest, self._skipped, self._rows = self._rest[:0], 0, 0

    def _cut(self, numbers: Numbers) -> _Windows:
        r = self._request
        self._rows += len(numbers)
        self.longest = max(self.longest, self._rows)
        rows = np.concatenate([self._rest, numbers])
        count = max(0, (len(rows) - self._skipped - r.rows) // r.stride + 1)
        starts = self._skipped + r.stride * np.arange(count)
        after = self._skipped + r.stride * count
        kept = min(after, len(rows))
        self._rest, self._skipped = rows[kept:], after - kept
        width = len(r.inputs)
        if not count:
            windows = np.empty((0, r.length, width), np.float32)
        else:
            every = sliding_window_view(rows[:, :width].astype(np.float32), r.length, axis=0)
            windows = every[starts].transpose(0, 2, 1)
        targets = rows[starts + r.rows - 1, width:]
        known = np.isfinite(targets)
        return _Windows(
            windows,
            np.where(known, targets, 0).astype(np.float32),
            known.astype(np.float32),
            np.full(count, self.group, np.int64),
        )


class _Writer:
    """Appends windows to a file."""

    def __init__(self, file: Any, request: Cut) -> None:
        self.count = 0
        width, outputs = len(request.inputs), len(request.outputs)
        rows = min(max(CHUNK_BYTES // (4 * request.length * width), 1), 1024)
        layout: dict[str, tuple[tuple[int, ...], str]] = {
            DATASETS[0]: ((request.length, width), "f4"),
            DATASETS[1]: ((outputs,), "f4"),
            MASK: ((outputs,), "f4"),
            TRAJECTORIES: ((), "i8"),
        }
        if not outputs:
            del layout[DATASETS[1]], layout[MASK]
        if request.group is None:
            del layout[TRAJECTORIES]
        self._datasets = {
            name: file.create_dataset(
                name, (0, *row), dtype, maxshape=(None, *row), chunks=(rows, *row), fletcher32=True
            )
            for name, (row, dtype) in layout.items()
        }

    def write(self, found: _Windows) -> None:
        before, self.count = self.count, self.count + len(found.windows)
        parts: tuple[NDArray[Any], ...] = found
        for name, part in zip((*DATASETS, TRAJECTORIES), parts, strict=True):
            if name in self._datasets and len(part):
                self._datasets[name].resize(self.count, axis=0)
                self._datasets[name][before:] = part


def _why_none(request: Cut, series: _Series, left_out: int) -> str:
    if left_out:
        return f"{request.table}: every window lacks an input or all outputs ({left_out:,} in all)"
    of = "the table has" if request.group is None else "its longest group has"
    return (
        f"{request.table}: {of} {series.longest:,} rows; a window of {request.length:,} "
        f"{f'and its outputs {request.ahead:,} rows ahead take' if request.rows > request.length else 'takes'} "
        f"{request.rows:,}"
    )
