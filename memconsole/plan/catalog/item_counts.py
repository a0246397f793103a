"""How many items a file of ratings holds: counted at once in a small file, remembered for a large one."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from memconsole.plan.catalog.rating_tables import RowError, TextTable, is_parquet
from memconsole.plan.counts import read_count, write_count
from memconsole.plan.errors import PlanError
from memconsole.plan.plan import DataChoice
from memconsole.regular_file import open_regular

SMALL_BYTES = 1 << 18
"""A file of text of at most this size is counted while a key is answered."""
ROWS = 500
"""Rows that are parsed at a time."""
_found: dict[str, int] = {}


def item_count(file: Path, data: DataChoice) -> int | None:
    """The items in `file`, of its first `data.max_examples` users; None while they are not counted."""
    try:
        name = count_name(file, data)
        small = file.stat().st_size <= SMALL_BYTES
    except OSError:
        return None
    if small and data.max_examples is None and not is_parquet(file):
        return _counted(name, file, _columns(data))
    count = _found.get(name) or read_count(name)
    if count is not None:
        _found[name] = count
    return count


def keep_item_count(name: str, count: int) -> None:
    """Remember a count. If the cache cannot be written, it is remembered for as long as this process lasts."""
    _found[name] = count
    try:
        write_count(name, count)
    except OSError:
        return


def count_name(file: Path, data: DataChoice) -> str:
    """The name of a count in the cache: the file in its present state, and the settings that matter. Raises `OSError`."""
    status = file.stat()
    version = status.st_mtime_ns, status.st_size
    words = "items", str(file), version, data.max_examples, repr(_columns(data))
    return hashlib.sha256(repr(words).encode()).hexdigest()


def _columns(data: DataChoice) -> DataChoice:
    return DataChoice(
        user_column=data.user_column, item_column=data.item_column, time_column=data.time_column
    )


@lru_cache(maxsize=64)
def _counted(name: str, file: Path, columns: DataChoice) -> int | None:
    """The items in a file that is small; None if it cannot be used. The trainer says why."""
    ids: set[str] = set()
    try:
        with open_regular(file) as opened:
            for part in TextTable(file, opened, columns).parts(ROWS):
                ids.update(part.items)
    except (OSError, PlanError, RowError):
        return None
    return len(ids) or None
