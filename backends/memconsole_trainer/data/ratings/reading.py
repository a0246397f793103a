"""Reads ratings in the layouts of MovieLens: `ratings.dat` with `::`, or `ratings.csv` with a header.

A rating says that a user rated an item at a time; the number of stars is not used. A row that
cannot be read is an error that names its line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.catalog.ratings import COLUMNS, lacking, places_of
from memconsole.plan.errors import printable
from memconsole.regular_file import open_regular
from memconsole_trainer.data.sources.documents import DataError

Int64 = NDArray[np.int64]
BLOCK_BYTES = 4 << 20
"""Bytes of the file that are parsed at a time."""


@dataclass(frozen=True)
class Ratings:
    """Users, items and times, sorted by user, time and place in the file; and a hash of the file."""

    users: Int64
    items: Int64
    fingerprint: str


class Layout(NamedTuple):
    """How the lines of a file are cut into fields."""

    separator: bytes
    width: int
    """Fields of a line."""
    columns: tuple[int, int, int, int | None]
    """Places of user, item, timestamp and, if there is one, rating."""


def read_ratings(path: Path, tick: Callable[[], None]) -> Ratings:
    """Read a whole file. Raises `DataError` with the file and the line."""
    digest, parts = hashlib.sha256(), []
    try:
        with open_regular(path) as file:
            first = 1
            layout = Layout(b"::", 4, (0, 1, 3, 2))
            if path.suffix.lower() == ".csv":
                header = file.readline()
                digest.update(header)
                layout, first = _table(path, header), 2
            for block in _blocks(file):
                digest.update(block)
                parts.append(_parsed(path, block, first, layout))
                first += block.count(b"\n") + (not block.endswith(b"\n"))
                tick()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if not parts:
        raise DataError(f"{path}: holds no ratings")
    users, items, times = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((times, users))  # stable: equal times stay in the order of the file
    return Ratings(users[order], items[order], digest.hexdigest())


def _blocks(file: Any) -> Iterator[bytes]:
    """Yield whole lines, about `BLOCK_BYTES` at a time."""
    rest = b""
    while more := file.read(BLOCK_BYTES):
        whole, newline, rest = (rest + more).rpartition(b"\n")
        if newline:
            yield whole + newline
    if rest.strip():
        yield rest


def _table(path: Path, header: bytes) -> Layout:
    """The layout that the header of a table describes."""
    places = places_of(header)
    if lacks := lacking(places):
        known = " or ".join(COLUMNS[lacks])
        shown = printable(header.decode("utf-8", "replace").lstrip("\ufeff").strip())
        raise DataError(f"{path}: line 1: lacks a column {lacks} ({known}); the header is {shown}")
    user, item, time = (places[name] or 0 for name in ("user", "item", "timestamp"))
    return Layout(b",", header.count(b",") + 1, (user, item, time, places["rating"]))


def _parsed(path: Path, block: bytes, first: int, layout: Layout) -> tuple[Int64, Int64, Int64]:
    """Users, items and times of whole lines, of which the first has the number `first`."""
    text = block.replace(b"\r\n", b"\n").removesuffix(b"\n") + b"\n"
    if layout.separator != b",":
        if b"\t" in text:
            _refuse(path, block, first, layout)
        text = text.replace(layout.separator, b"\t")
    bytes_ = np.frombuffer(text, np.uint8)
    mark = ord(",") if layout.separator == b"," else ord("\t")
    counts = np.cumsum(bytes_ == mark)[bytes_ == ord("\n")]
    if (np.diff(counts, prepend=0) != layout.width - 1).any():
        _refuse(path, block, first, layout)
    fields = text.replace(bytes([mark]), b"\n").split(b"\n")[:-1]
    user, item, time, rating = layout.columns
    try:
        found = [np.array(fields[c :: layout.width]).astype(np.int64) for c in (user, item, time)]
        if rating is not None:
            np.array(fields[rating :: layout.width]).astype(np.float64)
    except (ValueError, OverflowError):
        _refuse(path, block, first, layout)
    users, items, times = found
    if users.min() < 0 or items.min() < 0:
        _refuse(path, block, first, layout)
    return users, items, times


def _refuse(path: Path, block: bytes, first: int, layout: Layout) -> None:
    """Raise `DataError` for the first line that cannot be used."""
    wanted = ("user", "item", "timestamp", "rating")
    lines = block.removesuffix(b"\n").split(b"\n")
    for number, raw in enumerate(lines, start=first):
        line = raw.removesuffix(b"\r").decode("utf-8", "replace")
        fields = line.split(layout.separator.decode())
        where, shown = f"{path}: line {number:,}", printable(line, 80)
        if len(fields) != layout.width:
            raise DataError(
                f"{where}: has {len(fields)} fields, expected {layout.width}: {shown or 'nothing'}"
            )
        for name, place in zip(wanted, layout.columns, strict=True):
            if place is None:
                continue
            kind, words = (float, "a number") if name == "rating" else (int, "a whole number")
            try:
                value = kind(fields[place])
            except ValueError:
                raise DataError(f"{where}: the {name} is not {words}: {shown}") from None
            if name in ("user", "item") and value < 0:
                raise DataError(f"{where}: the {name} is out of range: {shown}; expected 0 or more")
            if kind is int and not -(2**63) <= value < 2**63:
                raise DataError(f"{where}: the {name} has too many digits: {shown}")
    raise DataError(f"{path}: lines {first:,} to {first + len(lines) - 1:,} cannot be read")
