"""Reads tables of ratings: files of text, and Parquet.

A row that cannot be read is an error that names its line.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.catalog.rating_tables import (
    Columns,
    Part,
    RowError,
    TextTable,
    columns_of,
    is_parquet,
)
from memconsole.plan.errors import printable
from memconsole.plan.plan import DataChoice
from memconsole.regular_file import open_regular
from memconsole_trainer.data.sources.documents import DataError

Int64 = NDArray[np.int64]
BLOCK_BYTES = 1 << 20
"""Bytes of the file that are read at a time."""
BLOCK_ROWS = 500
"""Rows of the file that are parsed at a time."""
_WHOLE = re.compile(r"\s*\+?(0|[1-9][0-9]{0,18})\s*")


@dataclass(frozen=True)
class Ratings:
    """Users and items, sorted by user, time and place in the file; and a hash of the file."""

    users: Int64
    items: Int64
    fingerprint: str
    item_names: tuple[str, ...] | None = None
    """The id of each item by its number; None if all ids are whole numbers, which are then the items' numbers."""
    user_names: tuple[str, ...] | None = None
    """The same of users."""
    timed: bool = True
    """Whether the table has times; without them, the order of the file is the order of time."""
    repeated: int = 0
    """Rows of the file that are the same as an earlier one, and are left out. A table without times has none: each of its
    rows is at a time of its own."""

    def ids(self, items: Int64) -> list[str]:
        """The ids of some items in the file."""
        names = self.item_names
        return [str(item) if names is None else names[item] for item in items.tolist()]

    @property
    def warning(self) -> str:
        """What is wrong with the file; empty if nothing is."""
        several = "rows are the same as an earlier one and are"
        one = "row is the same as an earlier one and is"
        words = one if self.repeated == 1 else several
        return f"{self.repeated:,} {words} left out" if self.repeated else ""

    def user_id(self, user: int) -> str:
        """The id of a user in the file."""
        return str(user) if self.user_names is None else self.user_names[user]


class Ids:
    """Numbers the ids of a column in the order in which they first appear."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__

    def numbered(self, ids: Sequence[str]) -> Int64:
        return np.fromiter(map(self._numbers.__getitem__, ids), np.int64, len(ids))

    def names(self) -> tuple[str, ...]:
        """The id of each number."""
        return tuple(self._numbers)

    def whole(self) -> Int64 | None:
        """The ids as whole numbers from 0, by their number; None if one of them is something else, or is written with
        leading zeros, which another file may have beside text."""
        if not all(map(_WHOLE.fullmatch, self._numbers)):
            return None
        try:
            return np.array(list(map(int, self._numbers)), np.int64)
        except OverflowError:
            return None


def read_ratings(path: Path, data: DataChoice, tick: Callable[[], None]) -> Ratings:
    """Read a whole file. Raises `DataError` with the file and the line, and `PlanError` if it has not the columns that
    the plan names."""
    digest = hashlib.sha256()
    users, items, parts = Ids(), Ids(), []
    with _errors(path), open_regular(path) as file:
        for part in _parts(path, file, data, digest):
            times = np.array(part.times or np.zeros(len(part.users), np.int64))
            if times.dtype != np.int64:
                times = times.astype(np.float64)
            hashes = np.array(part.rows, np.int64)
            parts.append((users.numbered(part.users), items.numbered(part.items), times, hashes))
            tick()
    if not parts:
        raise DataError(f"{path}: holds no ratings")
    user, item, time, hashes = (np.concatenate(column) for column in zip(*parts, strict=True))
    rows = len(user)
    if len(hashes):
        kept = np.sort(np.unique(hashes, return_index=True)[1])
        user, item, time = user[kept], item[kept], time[kept]
    whole_users, whole_items = users.whole(), items.whole()
    user = user if whole_users is None else whole_users[user]
    item = item if whole_items is None else whole_items[item]
    order = np.lexsort((time, user))  # stable: equal times stay in the order of the file
    return Ratings(
        user[order],
        item[order],
        digest.hexdigest(),
        items.names() if whole_items is None else None,
        users.names() if whole_users is None else None,
        timed=bool(part.times),
        repeated=rows - len(user),
    )


def first_users(ratings: Ratings, most: int | None) -> Ratings:
    """The ratings of the first `most` users."""
    if most is None:
        return ratings
    kept = ratings.users <= np.unique(ratings.users)[:most].max()
    return replace(ratings, users=ratings.users[kept], items=ratings.items[kept])


def rating_columns(path: Path, data: DataChoice) -> Columns:
    """The columns of a file. Raises `DataError`, and `PlanError` if it has not the columns that the plan names."""
    with _errors(path), open_regular(path) as file:
        if is_parquet(path):
            return columns_of(path, _parquet(path, file).schema_arrow.names, data)
        return TextTable(path, file, data).columns


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file into `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RowError as error:
        raise DataError(str(error)) from None


def _parts(path: Path, file: BufferedReader, data: DataChoice, digest: Any) -> Iterator[Part]:
    """All rows of a file, some at a time. `digest` is updated with all bytes of the file."""
    if not is_parquet(path):
        hashing = BufferedReader(_Hashing(file, digest), BLOCK_BYTES)
        yield from TextTable(path, hashing, data).parts(BLOCK_ROWS)
        return
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
    yield from _parquet_parts(path, _parquet(path, file), data)


class _Hashing(io.RawIOBase):
    """A file whose bytes update `digest` as they are read."""

    def __init__(self, file: BufferedReader, digest: Any) -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count


def _parquet(path: Path, file: BufferedReader) -> Any:
    """An open Parquet file."""
    import pyarrow.parquet  # takes 0.2 s, so only when such a file is read

    file.seek(0)
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise RowError(f"{path}: cannot be read as parquet: {_line(error)}") from None


def _parquet_parts(path: Path, table: Any, data: DataChoice) -> Iterator[Part]:
    """The rows of a Parquet file as texts, some at a time."""
    import pyarrow

    found = columns_of(path, table.schema_arrow.names, data)
    places = [place for place in (found.user, found.item, found.time) if place is not None]
    used = [found.names[place] for place in places]
    others = [f.name for f in table.schema_arrow if f.name not in used and _is_plain(f.type)]
    names = (*used, *others)
    read = Columns(names, 0, 1, None if found.time is None else 2)
    first = 1
    try:
        for batch in table.iter_batches(BLOCK_ROWS, columns=list(names)):
            texts = (batch.column(name).cast(pyarrow.string()).fill_null("") for name in names)
            rows = list(zip(*(column.to_pylist() for column in texts), strict=True))
            part = read.part(rows)
            if part is None:
                _refuse(path, read, rows, first)
            elif rows:
                yield part
            first += len(rows)
    except pyarrow.ArrowException as error:
        raise RowError(f"{path}: cannot be read as parquet: {_line(error)}") from None


def _is_plain(kind: Any) -> bool:
    """Whether a column can be written as text, to find rows that repeat another."""
    from pyarrow import types

    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_timestamp)
    return any(test(kind) for test in (*tests, types.is_date, types.is_string))


def _refuse(path: Path, columns: Columns, rows: Sequence[Sequence[str]], first: int) -> None:
    """Raise `RowError` for the first row that cannot be used. `first` is the number of the first one."""
    for number, row in enumerate(rows, start=first):
        if problem := columns.problem(row):
            raise RowError(f"{path}: row {number:,}: {problem}: {printable(', '.join(row), 80)}")


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))
