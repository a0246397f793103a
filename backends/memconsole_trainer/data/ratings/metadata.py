"""Metadata of items: titles and genres, from `movies.dat` or `movies.csv` beside the ratings."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memconsole import regular_file
from memconsole.plan.catalog.ratings import metadata_beside
from memconsole.plan.errors import printable
from memconsole_trainer.data.sources.documents import DataError

MOST_BYTES = 1 << 30
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


def find_metadata(ratings: Path) -> Metadata | None:
    """The metadata beside a file of ratings; None if there is none. Raises `DataError`."""
    path = metadata_beside(ratings)
    return None if path is None else _read(path)


def _read(path: Path) -> Metadata:
    try:
        data = regular_file.read(path, MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:  # MovieLens 1M is in Latin-1
        text = data.decode("latin-1")
    table = path.suffix.lower() == ".csv"
    lines = csv.reader(io.StringIO(text, newline="")) if table else _cut(text)
    found: dict[str, Described] = {}
    for number, fields in enumerate(lines, start=1):
        if not fields or (table and number == 1):
            continue
        if len(fields) < 3:
            shown = printable("::".join(fields), 80)
            raise DataError(f"{path}: line {number:,}: expected item, title and genres: {shown}")
        genres = tuple(g for g in fields[2].split("|") if g and not g.startswith("("))
        found[_id(fields[0])] = Described(fields[1], genres)
    return Metadata(found, hashlib.sha256(data).hexdigest())


def _cut(text: str) -> list[list[str]]:
    return [line.split("::") if line else [] for line in text.splitlines()]


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
