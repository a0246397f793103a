"""Cells of CSV and TSV tables: each is text as the file has it, and an empty one is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memconsole.plan.catalog import cells
from memconsole.regular_file import open_regular

HEADER_BYTES = 1 << 20
"""A longer header is not read to its end to find the separator."""
REPLACING = {"encoding_errors": "replace"}
"""The option of `datasets` for tables with bytes that are not UTF-8, which become U+FFFD. Other tables are read without it,
so that they keep their fingerprints."""


def separator(path: Path) -> str:
    """What separates the cells of a table."""
    with open_regular(path) as file:
        header = file.readline(HEADER_BYTES).decode("utf-8", "replace")
    return cells.separator(path.suffix.lower(), header)


def columns(path: Path) -> list[str]:
    """The names of the columns of a table."""
    import pandas

    table = pandas.read_csv(path, sep=separator(path), nrows=0, encoding_errors="replace")
    return [str(name) for name in table.columns]


def options(path: Path) -> dict[str, Any]:
    """The options of `datasets` for reading tables with the columns of `path`. Without them, pandas guesses types:
    `007` becomes 7, `true` becomes True, and `NA` is missing. If rows end with a comma more than the header has, it takes
    their first cells for an index."""
    from datasets import Features, Value

    return {
        "sep": separator(path),
        "features": Features({name: Value("string") for name in columns(path)}),
        "index_col": False,
        "keep_default_na": False,
        "na_values": [""],
    }
