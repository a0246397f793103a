"""Cells of CSV and TSV tables: each is text as the file has it, and an empty one is missing."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

GUESSED_ROWS = 10_000
"""Rows from which the types of a table's columns are guessed."""
FIRST_ROWS = 100
NUMBERS = ("integer", "floating", "boolean")
"""Types that are not text."""

Row = Mapping[str, Any]


def separator(path: Path) -> str:
    """What separates the cells of a table."""
    return "\t" if path.suffix.lower() == ".tsv" else ","


def columns(path: Path) -> list[str]:
    """The names of the columns of a table."""
    import pandas

    return [str(name) for name in pandas.read_csv(path, sep=separator(path), nrows=0).columns]


def options(path: Path) -> dict[str, Any]:
    """The options of `datasets` for reading tables with the columns of `path`. Without them, pandas guesses types:
    `007` becomes 7, `true` becomes True, and `NA` is missing."""
    from datasets import Features, Value

    return {
        "sep": separator(path),
        "features": Features({name: Value("string") for name in columns(path)}),
        "keep_default_na": False,
        "na_values": [""],
    }


def guessed(path: Path) -> Callable[[Row], Row]:
    """Gives the cells of a row the types that pandas guesses for the columns of `path`. Fingerprints of records are
    made of such values."""
    import pandas
    import pyarrow

    def kinds(rows: int, columns: Collection[str] | None) -> dict[str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of columns that hold numbers and words
            head = pandas.read_csv(path, sep=separator(path), nrows=rows, usecols=columns)
        return {name: pandas.api.types.infer_dtype(head[name]) for name in head}

    # Long texts are recognized in the first rows, so that few of them are in memory.
    found = kinds(FIRST_ROWS, None)
    found |= kinds(GUESSED_ROWS, [name for name, kind in found.items() if kind in NUMBERS])
    text = {name: str for name, kind in found.items() if kind not in NUMBERS}

    def typed(row: Row) -> Row:
        lines = io.StringIO()
        csv.writer(lines).writerows([row, row.values()])
        lines.seek(0)
        cells = pandas.read_csv(lines, dtype=text)
        values = pyarrow.Table.from_pandas(cells, preserve_index=False).to_pylist()[0]
        floats = {name for name, kind in found.items() if kind == "floating"}
        return {n: float(v) if n in floats and v is not None else v for n, v in values.items()}

    return typed
