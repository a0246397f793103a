"""Files of ratings: their names, how they are distinguished from text, and the check of their first rows."""

from __future__ import annotations

from pathlib import Path

from memconsole.given_path import given_path
from memconsole.once_per_version import once_per_version
from memconsole.plan.catalog.rating_tables import RowError, TextTable, is_parquet
from memconsole.plan.errors import PlanError
from memconsole.plan.plan import DataChoice
from memconsole.regular_file import open_regular

RATING_FILES = (".dat", ".data", ".csv", ".tsv", ".inter", ".parquet")
NAMES = ("ratings.dat", "ratings.csv", "u.data")
"""Files that stand for their folder."""
METADATA_NAMES = ("movies.dat", "movies.csv", "items.dat", "items.csv")
"""Files of titles and genres, beside those of ratings."""
CHECKED_ROWS = 1000
"""First rows of a file that are checked before a run starts."""


def looks_like_ratings(path: Path, data: DataChoice) -> bool:
    """Whether the first line is that of ratings: a header with a user and an item and without the column of the text,
    or as in MovieLens four fields without a header. Raises `OSError`."""
    if path.suffix.lower() not in RATING_FILES or is_parquet(path):
        return False
    try:
        with open_regular(path) as file:
            table = TextTable(path, file, data)
    except (PlanError, RowError):
        return False
    if table.has_header:
        return data.template is None and data.text_column not in table.columns.names
    whole = len(table.first) == 4 and all(field.strip().isdigit() for field in table.first[:2])
    return whole and table.separator in ("::", "\t")


def check_ratings(path: Path, data: DataChoice) -> None:
    """Raise `PlanError` if the columns or the first rows of a file cannot be used. Parquet is not read."""
    if is_parquet(path):
        return
    try:
        _check(path, data)
    except OSError:
        return  # the trainer reports why
    except RowError as error:
        raise PlanError(str(error), "data.source") from None


@once_per_version(16)
def _check(path: Path, data: DataChoice) -> None:
    with open_regular(path) as file:
        table = TextTable(path, file, data)
        if next(table.parts(CHECKED_ROWS), None) is None:
            raise RowError(f"{path}: holds no ratings")


def metadata_beside(ratings: Path) -> tuple[Path, ...]:
    """The files beside a file of ratings that may hold titles and genres. The first one that does is used."""
    files = (ratings.with_name(name) for name in METADATA_NAMES)
    return tuple(file for file in files if file.is_file() and file != ratings)


def rating_file(source: str, data: DataChoice) -> Path | None:
    """The file of ratings that a path names, or that is in a folder; None if the path's name is of another kind."""
    where = given_path(source).absolute()
    rated = where.name.lower().endswith(RATING_FILES)
    return where if rated else ratings_in(where, data)


def ratings_in(folder: Path, data: DataChoice | None = None) -> Path | None:
    """The file of ratings in a folder of MovieLens; None if there is none. A plan that names columns of ratings says
    that a file of such a name is one."""
    d = data or DataChoice()
    columns = DataChoice(
        user_column=d.user_column, item_column=d.item_column, time_column=d.time_column
    )
    try:
        return _ratings_in(folder, columns) if folder.is_dir() else None
    except (OSError, ValueError):
        return None


@once_per_version(64)
def _ratings_in(folder: Path, columns: DataChoice) -> Path | None:
    files = (folder / name for name in NAMES)
    named = columns != DataChoice()
    return next(
        (f for f in files if f.exists() and (named or looks_like_ratings(f, columns))), None
    )
