"""Files of ratings in the layouts of MovieLens: their names, and how they are distinguished from text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from memconsole.regular_file import open_regular

RATING_FILES = (".dat", ".csv")
NAMES = tuple(f"ratings{suffix}" for suffix in RATING_FILES)
COLUMNS = {
    "user": ("userid", "user"),
    "item": ("movieid", "itemid", "item", "movie"),
    "rating": ("rating", "score"),
    "timestamp": ("timestamp", "time"),
}
"""Names of each column in the header of a table, in lower case without underscores."""


def places_of(header: bytes) -> dict[str, int | None]:
    """The index of each column in a header; None for a column that is missing."""
    words = header.decode("utf-8", "replace").lstrip("\ufeff").strip()
    names = [name.strip().strip('"').lower().replace("_", "") for name in words.split(",")]
    return {
        column: next((names.index(name) for name in known if name in names), None)
        for column, known in COLUMNS.items()
    }


def lacking(places: dict[str, int | None]) -> str:
    """The first required column that is missing; empty if none is."""
    return next((c for c, place in places.items() if place is None and c != "rating"), "")


def looks_like_ratings(path: Path) -> bool:
    """Whether the first line is that of ratings: a header that names their columns, or four fields
    with `::` between them. Raises `OSError`."""
    suffix = path.suffix.lower()
    if suffix not in RATING_FILES:
        return False
    with open_regular(path) as file:
        first = file.readline(4096)
    if suffix == ".csv":
        return not lacking(places_of(first))
    fields = first.split(b"::")
    return len(fields) == 4 and all(field.strip().isdigit() for field in fields[:2])


def ratings_in(folder: Path) -> Path | None:
    """The file of ratings in a folder of MovieLens; None if there is none."""
    try:
        return _ratings_in(folder, folder.stat().st_mtime_ns) if folder.is_dir() else None
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=64)
def _ratings_in(folder: Path, changed: int) -> Path | None:
    """`ratings_in`, cached by the folder's modification time `changed`."""
    files = (folder / name for name in NAMES)
    return next((file for file in files if file.exists() and looks_like_ratings(file)), None)
