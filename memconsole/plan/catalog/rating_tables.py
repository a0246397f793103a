"""The columns and rows of a table of ratings in a file of text.

The trainer reads all rows, and a plan is checked with the first ones. A rating says that a user met an item at a
time; the number of stars is not used.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any, NamedTuple

from memconsole.errors import UserError
from memconsole.plan.errors import PlanError, printable, quote
from memconsole.plan.plan import DataChoice, nearest

KNOWN = {
    "user": ("userid", "user", "uid", "customerid", "customer", "reviewerid", "visitorid", "sessionid"),
    "item": (
        "movieid", "itemid", "item", "movie", "iid", "productid", "product", "articleid", "asin",
        "bookid", "trackid", "songid",
    ),
    "time": ("timestamp", "time", "datetime", "date", "eventtime", "unixreviewtime", "createdat"),
}  # fmt: skip
"""Names by which columns are found without a setting: in lower case, without underscores, hyphens and spaces."""
MOVIELENS = ("user", "item", "rating", "timestamp")
"""The columns of a file without a header."""
_WIDE_MARKS = ("\\xff\\xfe", "\\xfe\\xff")
"""Byte order marks of UTF-16 and UTF-32 as they are read with `backslashreplace`."""
MOST_CHARACTERS = 1 << 20
"""Characters of a line that are read at once; the rest of a longer line counts as another line."""


class RowError(UserError, ValueError):
    """A row cannot be used. The message is one line that names the file and the row."""


class Part(NamedTuple):
    """Some rows, column by column."""

    users: Sequence[str]
    items: Sequence[str]
    times: Sequence[float]
    """In seconds, or in the unit of the file's numbers. Empty if the table has no column of times."""
    rows: Sequence[int]
    """A hash of each whole row, by which rows that repeat another are found. It differs from process to process. Empty if
    the table has no column of times."""


class Columns(NamedTuple):
    """The columns of a table, and the places of those that are read."""

    names: tuple[str, ...]
    user: int
    item: int
    time: int | None
    """None: the order of the rows is the order of time."""

    @property
    def described(self) -> tuple[str, ...]:
        """Every column with what it is used for, such as ``userId (user)``."""
        used = {self.user: " (user)", self.item: " (item)", self.time: " (time)"}
        return tuple(name + used.get(place, "") for place, name in enumerate(self.names))

    def part(self, rows: Sequence[Sequence[str]]) -> Part | None:
        """The rows column by column; None if one of them cannot be used."""
        if set(map(len, rows)) - {len(self.names)}:
            return None
        users, items = (list(map(itemgetter(c), rows)) for c in (self.user, self.item))
        if "" in users or "" in items:
            return None
        try:
            times = [] if self.time is None else numbers(list(map(itemgetter(self.time), rows)))
        except ValueError:
            return None
        hashes = [] if self.time is None else list(map(hash, map(tuple, rows)))
        return Part(users, items, times, hashes)

    def problem(self, row: Sequence[str]) -> str:
        """Why a row cannot be used; empty if it can."""
        if len(row) != len(self.names):
            return f"has {len(row)} fields, expected {len(self.names)}"
        for name, place in (("user", self.user), ("item", self.item), ("time", self.time)):
            if place is not None and not row[place]:
                return f"the {name} is empty"
        if self.part([row]) is None:
            return "the time is neither a number nor an ISO date"
        return ""


def is_parquet(path: Path) -> bool:
    """Whether a file is of Parquet, by its name. Only the trainer reads it."""
    return path.suffix.lower() == ".parquet"


def columns_of(path: Path, names: Sequence[str], data: DataChoice) -> Columns:
    """The columns that the plan names, or those with a known name. Raises `PlanError`, which lists all columns."""
    plain = [plain_name(name) for name in names]
    places: dict[str, int | None] = {}
    for column, known in KNOWN.items():
        key = f"data.{column}_column"
        asked = getattr(data, f"{column}_column")
        listed = ", ".join(map(printable, names)) or "none"
        if asked is not None and asked not in names:
            raise PlanError(
                f"{key} = {quote(asked)}: {path} has no such column{nearest(asked, names)}; its columns are: {listed}",
                key,
            )
        found = names.index(asked) if asked is not None else _first(plain, known)
        if found is None and column != "time":
            raise PlanError(f"{path}: no column of {column}s; set {key} to one of: {listed}", key)
        places[column] = found
    return Columns(tuple(names), places["user"] or 0, places["item"] or 0, places["time"])


def plain_name(name: str) -> str:
    """A column's name as `KNOWN` has it, without the type that RecBole writes after a colon."""
    return name.partition(":")[0].strip().lower().translate(str.maketrans("", "", "_- "))


def _first(names: Sequence[str], known: Iterable[str]) -> int | None:
    return next((names.index(name) for name in known if name in names), None)


def numbers(times: Sequence[str]) -> Sequence[float]:
    """Times as numbers: whole if all are. Raises `ValueError` unless each is a finite number or an ISO date."""
    try:
        return list(map(int, times))
    except ValueError:
        return list(map(_number, times))


def _number(time: str) -> float:
    """A number as it is, or the seconds from 1970 to an ISO date, in UTC unless the date says otherwise."""
    try:
        found = float(time)
    except ValueError:
        moment = datetime.fromisoformat(time.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(found):
        raise ValueError(time)
    return found


class TextTable:
    """A table in an open file: separated by `::`, tabs, semicolons or commas, with a header or with the columns
    `MOVIELENS`."""

    def __init__(
        self, path: Path, file: io.BufferedReader[Any] | io.BytesIO, data: DataChoice
    ) -> None:
        """Reads the first row. Raises `PlanError` for columns that are not there, `RowError` for a file that is
        empty or not UTF-8."""
        self._path = path
        text = io.TextIOWrapper(file, "utf-8-sig", "backslashreplace", newline="")
        lines = iter(partial(text.readline, MOST_CHARACTERS), "")
        first = next(lines, "")
        if first[:10].lstrip("\0").startswith(_WIDE_MARKS):
            raise RowError(f"{path}: is UTF-16 or UTF-32; save it as UTF-8")
        self.separator = "::" if "::" in first else max("\t;,", key=first.count)
        lines = chain([first], lines)
        if self.separator == "::":
            lines = map(methodcaller("replace", "::", "\t"), lines)
        self._reader = csv.reader(
            lines,
            delimiter="\t" if self.separator == "::" else self.separator,
            quoting=csv.QUOTE_NONE if self.separator == "::" else csv.QUOTE_MINIMAL,
            skipinitialspace=True,
            strict=True,
        )
        with self._errors():
            self.first = next(filter(None, self._reader), [])
        if not self.first:
            raise RowError(f"{path}: holds no ratings")
        if len(self.first) < 2:
            shown = printable(self.first[0], 80)
            raise RowError(f"{path}: line 1: has 1 field, expected a user and an item: {shown}")
        self.has_header = self.separator != "::" and not any(map(_is_number, self.first))
        self.columns = columns_of(path, self.first if self.has_header else MOVIELENS, data)

    def parts(self, rows: int) -> Iterator[Part]:
        """All rows, at most `rows` at a time. Blank lines are left out. Raises `RowError`."""
        line = self._reader.line_num - (not self.has_header)
        left = chain([] if self.has_header else [self.first], self._reader)
        while True:
            with self._errors():
                found = list(islice(left, rows))
            if not found:
                return
            kept = [row for row in found if row]
            part = self.columns.part(kept)
            if part is None:
                self._refuse(found, line)
            elif kept:
                yield part
            line = self._reader.line_num

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except csv.Error as error:
            raise RowError(f"{self._path}: line {self._reader.line_num:,}: {error}") from None

    def _refuse(self, rows: Sequence[Sequence[str]], line: int) -> None:
        """Raise `RowError` for the first row that cannot be used. `line` lines come before the rows."""
        for row in rows:
            problem = self.columns.problem(row) if row else ""
            if problem:
                shown = printable(self.separator.join(row), 80)
                raise RowError(f"{self._path}: line {line + 1:,}: {problem}: {shown}")
            line += 1 + sum(field.count("\n") for field in row)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
