"""The Python standard library's own source files: real text found on every machine."""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
)
"""Installed packages, and test suites full of generated data."""


@lru_cache(maxsize=1)
def directory() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def files() -> tuple[Path, ...]:
    """Every non-empty ``.py`` file of the standard library, sorted by relative path.

    The trainer reads exactly these files and holds out whole files; the estimate adds up their sizes.
    """
    return tuple(path for path, _ in _listing(directory()))


def sizes() -> tuple[int, ...]:
    """Bytes of each of `files`."""
    return tuple(size for _, size in _listing(directory()))


@lru_cache(maxsize=4)
def _listing(root: Path) -> tuple[tuple[Path, int], ...]:
    """The files below `root` with their bytes."""
    files_with_sizes: list[tuple[str, Path, int]] = []
    for folder, names, entries in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS]
        for entry in entries:
            if not entry.endswith(".py"):
                continue
            path = Path(folder, entry)
            try:
                size = path.stat().st_size
            except OSError:
                continue
            if size:
                files_with_sizes.append((path.relative_to(root).as_posix(), path, size))
    return tuple((path, size) for _, path, size in sorted(files_with_sizes))
