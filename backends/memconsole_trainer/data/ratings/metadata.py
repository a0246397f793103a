"""Metadata of items: titles and genres, from a table beside the ratings such as `movies.csv`."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole import regular_file
from memconsole.plan.catalog.rating_tables import KNOWN, plain_name
from memconsole.plan.catalog.ratings import metadata_beside
from memconsole.plan.errors import printable
from memconsole.plan.plan import DataChoice

MOST_BYTES = 1 << 30
IDS = ("id", *KNOWN["item"])
TITLES = ("title", "name", "movietitle", "itemtitle", "productname")
GENRES = ("genres", "genre", "categories", "category")
"""Names of columns, as `plain_name` writes them."""
TITLE_WORDS = 100
"""The commonest words of titles that are features."""
_WORD = re.compile(r"[a-z]{3,}")


class Described(NamedTuple):
    """An item's title and genres."""

    title: str
    genres: tuple[str, ...]


class Metadata(NamedTuple):
    """The items of a file by their id in the ratings, and a hash of the file."""

    items: Mapping[str, Described]
    fingerprint: str


def find_metadata(ratings: Path, data: DataChoice, warn: Callable[[str], None]) -> Metadata | None:
    """The metadata beside a file of ratings; None if there is none. `warn` is told of a file that cannot be used, and of
    clustering without metadata."""
    found, problems = None, []
    for path in metadata_beside(ratings):
        try:
            found = _read(path, data)
            break
        except _Unusable as error:
            problems.append(f"{path} is left out: {error}")
    if found is None:
        problems = problems or ["no metadata beside the ratings"]
        problems[-1] += "; items are clustered by the items near them in histories"
    for problem in problems:
        warn(problem)
    return found


class _Unusable(ValueError):
    """A file does not describe items."""


def _read(path: Path, data: DataChoice) -> Metadata:
    try:
        content = regular_file.read(path, MOST_BYTES)
    except OSError as error:
        raise _Unusable(f"it cannot be read: {error.strerror or error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:  # MovieLens 1M is in Latin-1
        text = content.decode("latin-1")
    found: dict[str, Described] = {}
    try:
        rows: Iterator[tuple[int, list[str]]] = enumerate(_rows(path, text), start=1)
        number, first = next((row for row in rows if row[1]), (1, []))
        places = _places(first, data)
        if places is None:
            places, rows = (0, 1, 2), chain([(number, first)], rows)
        least = 1 + max(place for place in places if place is not None)
        for number, fields in rows:
            if fields and len(fields) < least:
                shown = printable(", ".join(fields), 80)
                raise _Unusable(f"line {number:,}: expected item, title and genres: {shown}")
            if fields:
                own, title, genres = (None if p is None else fields[p] for p in places)
                found[_id(own or "")] = Described(title or "", _genres(genres or ""))
    except csv.Error as error:
        raise _Unusable(str(error)) from None
    return Metadata(found, hashlib.sha256(content).hexdigest())


def _rows(path: Path, text: str) -> Iterable[list[str]]:
    """The fields of each line; none of a blank one."""
    if path.suffix.lower() == ".csv":
        separator = max("\t;,", key=text.partition("\n")[0].count)
        return csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    return (line.split("::") if line else [] for line in text.splitlines())


def _places(first: Sequence[str], data: DataChoice) -> tuple[int, int | None, int | None] | None:
    """The columns of ids, titles and genres in a header; None if the first line is an item. Raises `_Unusable`."""
    names = [plain_name(field) for field in first]
    own = (plain_name(data.item_column),) if data.item_column else ()
    found = [
        next((names.index(name) for name in known if name in names), None)
        for known in ((*own, *IDS), TITLES, GENRES)
    ]
    id_, title, genres = found
    if id_ is not None and (title is not None or genres is not None):
        return id_, title, genres
    if len(first) >= 3 and first[0].strip().isdecimal():
        return None
    listed = printable(", ".join(first), 80)
    raise _Unusable(f"expected columns of ids, and titles or genres; its columns are: {listed}")


def _genres(field: str) -> tuple[str, ...]:
    return tuple(g for g in field.split("|") if g and not g.startswith("("))


def _id(word: str) -> str:
    """An item's id; of a whole number without leading zeros."""
    return str(int(word)) if word.isdecimal() else word


def features(metadata: Metadata, items: Sequence[str]) -> NDArray[np.float32]:
    """Rows of length 1 for `items` (items, features): genres, and the commonest words of titles weighted
    by how rare they are (TF-IDF). The row of an item without metadata is zero."""
    known = [metadata.items.get(_id(item)) for item in items]
    genres = sorted({g for one in known if one for g in one.genres})
    words = [set(_WORD.findall(one.title.lower())) if one else set() for one in known]
    counts = Counter(word for found in words for word in found)
    common = sorted(counts, key=lambda word: (-counts[word], word))[:TITLE_WORDS]
    rare = {w: np.log(len(items) / counts[w]) for w in common if counts[w] > 1}
    column = {name: place for place, name in enumerate([*genres, *(f"word {w}" for w in rare)])}
    found = np.zeros((len(items), max(1, len(column))), np.float32)
    for row, (one, own) in enumerate(zip(known, words, strict=True)):
        for genre in one.genres if one else ():
            found[row, column[genre]] = 1.0
        weights = {w: rare[w] for w in own if w in rare}
        length = np.sqrt(sum(value**2 for value in weights.values()))
        for word, value in weights.items():
            found[row, column[f"word {word}"]] = value / length if length else 0.0
    return unit(found)


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; zero rows stay zero."""
    lengths = np.sqrt(np.square(rows).sum(1, keepdims=True))
    return (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)
