"""Remembers what a file holds until it changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, TypeVarTuple

Rest = TypeVarTuple("Rest")
T = TypeVar("T")


def once_per_version(
    most: int,
) -> Callable[[Callable[[Path, *Rest], T]], Callable[[Path, *Rest], T]]:
    """Makes a function of a file or folder, and of other values that can be hashed, keep its last `most` answers. The file
    is read again when its modification time or its size changes.

    The function also raises what `Path.stat` does. An exception is not kept.
    """

    def decorate(read: Callable[[Path, *Rest], T]) -> Callable[[Path, *Rest], T]:
        @lru_cache(maxsize=most)
        def kept(version: tuple[int, int], path: Path, *rest: *Rest) -> T:
            return read(path, *rest)

        def current(path: Path, *rest: *Rest) -> T:
            status = path.stat()
            return kept((status.st_mtime_ns, status.st_size), path, *rest)

        return current

    return decorate
