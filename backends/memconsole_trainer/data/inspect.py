"""Inspects a dataset before training: columns, count, size and a sample."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from memconsole.plan import catalog
from memconsole.plan.catalog.folders import ROWS, TABLES, Folder, folder, plain_suffix
from memconsole.plan.catalog.rating_tables import is_parquet
from memconsole.plan.catalog.ratings import RATING_FILES, looks_like_ratings
from memconsole.plan.catalog.windows import DATASETS, shape_problem
from memconsole.plan.data.lengths import Lengths
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.tasks import task_of
from memconsole.plan.tasks.recommendation import RECOMMENDATION
from memconsole_trainer.data.ratings.reading import first_users, rating_columns, read_ratings
from memconsole_trainer.data.sources import hdf5
from memconsole_trainer.data.sources import opening as sources
from memconsole_trainer.data.sources.documents import DataError, Documents
from memconsole_trainer.data.sources.hdf5 import Hdf5Dataset, TokenRows
from memconsole_trainer.data.sources.tables import column_types, header
from memconsole_trainer.data.sources.text_warnings import text_warnings
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.statistics_lines import statistics_lines

SAMPLE_CHARACTERS = 2000
SAMPLE_TOKENS = 64
ANY_TOKEN = 2**31
_OR_RATINGS = "; for ratings set data.user_column and data.item_column"


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. None: it cannot be known without reading all data."""

    source: str
    kind: str
    """texts | tokens | windows | ratings | unusable"""
    documents: int | None
    size_bytes: int | None
    """Size of the files on disk, if the source is made of files."""
    files: str = ""
    """For a folder: which files are read, if some are left out."""
    items: int | None = None
    """The items of ratings, of the first `data.max_examples` users."""
    columns: tuple[str, ...] = ()
    """Columns of a table, or datasets of an HDF5 file, with their types."""
    row_tokens: int | None = None
    sample: str = ""
    warning: str = ""
    """What is wrong with some of it."""
    problem: str = ""
    """Why the plan cannot train on it."""
    lengths: Lengths | None = None
    """Tokens per document, if requested."""
    lengths_problem: str = ""
    """Why `lengths` is missing although it was requested."""


def inspect(plan: Plan, *, lengths: bool = False) -> Inspection:
    """Inspect `plan.data`, and tokenize some of it if `lengths` is set. Raises `DataError` if it
    cannot be read at all, `PlanError` if the source does not exist."""
    entry = catalog.dataset(plan)
    path = Path(entry.where).expanduser() if entry.kind == "file" else None
    if path is not None and path.is_file() and _holds_ratings(path, plan):
        return _ratings(plan, path)
    columns = _columns(path, plan) if path is not None else ()
    inside = folder(path) if path is not None and path.is_dir() else None
    files = inside.words if inside is not None else ""
    size = _size(path, inside) if path is not None else entry.bytes
    if path is not None and DATASETS[0] in {column.partition(" ")[0] for column in columns}:
        return _windows(plan.data.source, path, columns, size)
    try:
        found = sources.open_source(plan, ANY_TOKEN)
    except PlanError as error:
        if error.key != "data.text_column":
            raise
        return Inspection(
            source=plan.data.source,
            kind="unusable",
            documents=None,
            size_bytes=size,
            files=files,
            columns=columns,
            problem=f"{error}{_OR_RATINGS if path and path.suffix.lower() in RATING_FILES else ''}",
        )
    if isinstance(found, TokenRows):
        sample = " ".join(str(t) for t in found.rows(0, 1)[0][:SAMPLE_TOKENS])
        kind, width, warning = "tokens", found.width, ""
    else:
        sample, kind, width = _first_text(found), "texts", None
        warning = "; ".join(text_warnings(plan.data.source, found))
    measured, why = _measured(plan, found) if lengths else (None, "")
    return Inspection(
        source=plan.data.source,
        kind=kind,
        documents=found.count,
        size_bytes=size,
        files=files,
        columns=columns,
        row_tokens=width,
        sample=sample,
        warning=warning,
        lengths=measured,
        lengths_problem=why,
    )


def _windows(source: str, path: Path, columns: tuple[str, ...], size: int | None) -> Inspection:
    """A file of windows: how many there are, and of which families of systems."""
    count, sample = None, ""
    names = {column.partition(" ")[0] for column in columns}
    shapes = {name: Hdf5Dataset(path, name, None).shape for name in DATASETS if name in names}
    problem = shape_problem(shapes)
    if problem is not None:
        problem = f"{path}: {problem}"
    else:
        windows, controls = (shapes[name] for name in DATASETS[:2])
        try:
            file = WindowFile(path, windows[2], controls[1], windows[1], None)
            count = file.count
            sample = f"{windows[1]} steps of {windows[2]} features to {controls[1]} controls"
            sample += "".join(f"\n{line}" for line in (*statistics_lines(file), *file.families))
        except (DataError, PlanError) as error:
            problem = str(error)
    return Inspection(
        source=source,
        kind="unusable" if problem else "windows",
        documents=count,
        size_bytes=size,
        columns=tuple(line for line in columns if "/" not in line.partition(" ")[0]),
        sample=sample,
        problem=problem or "",
    )


def _holds_ratings(path: Path, plan: Plan) -> bool:
    """Whether a file is ratings, or the plan says so: with a recommender, or with a column of ratings."""
    d = plan.data
    if path.suffix.lower() not in RATING_FILES:
        return False
    if task_of(plan) is RECOMMENDATION or d.user_column or d.item_column or d.time_column:
        return True
    try:
        if is_parquet(path):
            return d.template is None and d.text_column not in rating_columns(path, d).names
        return looks_like_ratings(path, d)
    except (PlanError, DataError):
        return False
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _ratings(plan: Plan, path: Path) -> Inspection:
    """A file of ratings: how many there are, of how many users and items."""
    problem, warning, count, sample = "", "", None, ""
    own: int | None = None
    columns: tuple[str, ...] = ()
    try:
        columns = rating_columns(path, plan.data).described
        found = read_ratings(path, plan.data, lambda: None)
    except (DataError, PlanError) as error:
        problem = str(error)
    else:
        count, warning = len(found.items), found.warning
        users, items = len(np.unique(found.users)), len(np.unique(found.items))
        own = len(np.unique(first_users(found, plan.data.max_examples).items))
        sample = f"{count:,} interactions of {users:,} users with {items:,} items"
        sample += "" if found.timed else ", in the order of the file: it has no times"
    return Inspection(
        source=plan.data.source,
        kind="unusable" if problem else "ratings",
        documents=count,
        size_bytes=_size(path),
        items=own,
        columns=columns,
        sample=sample,
        warning=warning,
        problem=problem,
    )


def _measured(plan: Plan, source: Documents | TokenRows) -> tuple[Lengths | None, str]:
    from memconsole_trainer.data.text.lengths import measure_lengths

    try:
        return measure_lengths(plan, source), ""
    except (PlanError, DataError) as error:
        return None, str(error)


def _first_text(documents: Documents) -> str:
    texts = documents.read(0, 1)
    return texts[0][:SAMPLE_CHARACTERS] if texts else ""


def _columns(path: Path, plan: Plan) -> tuple[str, ...]:
    suffix = plain_suffix(path.name)
    if path.is_file() and suffix in ROWS:
        return tuple(hdf5.describe(path))
    if path.is_file() and suffix in TABLES:
        if suffix == ".parquet":
            types = header("parquet", path)
        else:
            types = column_types(sources.open_table(TABLES[suffix], [path], plan.data).features)
        return tuple(f"{name} {kind}" for name, kind in types.items())
    return ()


def _size(path: Path, inside: Folder | None = None) -> int | None:
    if inside is not None:
        return inside.bytes
    return path.stat().st_size if path.is_file() else None
