"""Loads CSV, Parquet and JSON files as tables that `datasets` keeps on disk and maps into memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from memconsole.plan.catalog.encodings import HEAD_BYTES, encoding_of
from memconsole.regular_file import check_regular
from memconsole.runs.record.failures.failure import cause_of
from memconsole_trainer.data.sources import csv_cells, json_lines, json_nulls, records
from memconsole_trainer.data.sources.documents import DataError, NoRoomError

TEXT_TYPES = ("string", "large_string", "string_view")
"""Types of columns that hold text."""
MIXED = "mixed types"
"""The type of a column whose values are of several types, such as texts and numbers."""


def load_table(
    kind: str, files: Sequence[Path], used: Collection[str] | None = None, only: bool = False
) -> Any:
    """Load `files` as a memory-mapped `datasets.Dataset`. They are tables of one format, or the parts of a table that
    `datasets` has saved. Raises `DataError`.

    If the files differ in their columns, those that are not `used` are left out, and missing ones are null.
    With `only`, Parquet is read without the columns that are not used.

    A name is the name of one file, whatever characters it has. `datasets.load_dataset` would take
    it for a pattern, and would report each load to a server.
    """
    for path in files:
        try:
            check_regular(path)
            with path.open("rb") as file:
                encoding = encoding_of(file.read(HEAD_BYTES))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if encoding != "utf-8":
            raise DataError(f"{path}: is {encoding.upper()}; save it as UTF-8")
        if "::" in str(path):
            raise DataError(f'{path}: "::" in the name of a table cannot be read; rename it')
    apart = kind == "csv" or (kind == "parquet" and not only)
    if apart and len({(*sorted(header(kind, path)), _separator(kind, path)) for path in files}) > 1:
        return _joined(kind, files, used)
    try:
        return _built(kind, files, used if only else None)
    except DataError:
        raise
    except Exception as error:
        if kind == "jsonl":
            return _repaired_lines(files, used)
        if kind == "csv" and isinstance(error.__cause__ or error, UnicodeDecodeError):
            try:
                return _built(kind, files, None, csv_cells.REPLACING)
            except DataError:
                raise
            except Exception as again:
                raise _unreadable(kind, files[0], again) from again
        if len(files) == 1 or kind == "arrow":
            raise _unreadable(kind, files[0], error) from error
    return _joined(kind, files, used)


def _separator(kind: str, path: Path) -> str:
    return csv_cells.separator(path) if kind == "csv" else ""


def header(kind: str, path: Path) -> dict[str, str]:
    """The columns of a CSV or Parquet file by name, with their types. Raises `DataError`."""
    try:
        if kind == "csv":
            return dict.fromkeys(csv_cells.columns(path), "string")
        from datasets import Features
        from pyarrow import parquet

        return column_types(Features.from_arrow_schema(parquet.read_schema(path)))
    except Exception as error:
        raise _unreadable(kind, path, error) from error


def column_types(features: Any) -> dict[str, str]:
    """The type of each column of a table, by name: a type of Arrow, or "list", "object" or "mixed types"."""
    return {name: _column_type(feature) for name, feature in features.items()}


def _column_type(feature: Any) -> str:
    if isinstance(feature, dict):
        return "object"
    if type(feature).__name__ == "Json":
        return MIXED
    return str(getattr(feature, "dtype", "list"))


def _built(
    kind: str,
    files: Sequence[Path],
    columns: Collection[str] | None,
    more: Mapping[str, Any] | None = None,
) -> Any:
    """The table of `files`; `more` are options of its reader."""
    import datasets  # takes 1.5 s, so only when a table is read
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    if kind == "arrow":
        return datasets.load_from_disk(str(files[0].parent)).with_format(None)
    form = "json" if kind == "jsonl" else kind
    options = csv_cells.options(files[0]) if kind == "csv" else {}
    if kind == "parquet" and columns is not None:
        options = {"columns": sorted(columns)}
    # The library keeps what it has read in its cache, under a hash of names, sizes and times.
    stamps = [(str(s.st_size), str(s.st_mtime_ns)) for s in map(Path.stat, files)]
    module = importlib.import_module(f"datasets.packaged_modules.{form}.{form}")
    builder = getattr(module, form.capitalize())(
        data_files=DataFilesDict({"train": DataFilesList([str(p) for p in files], stamps)}),
        hash=datasets.__version__,
        **options,
        **(more or {}),
    )
    if form == "json" and not os.path.exists(builder.cache_dir):
        for path in files:
            json_nulls.check(path, kind == "jsonl")
    builder.download_and_prepare()
    if not builder.info.splits or not builder.info.splits["train"].num_examples:
        raise DataError(f"{files[0]}: holds no rows")
    return builder.as_dataset(split="train")


def _joined(kind: str, files: Sequence[Path], used: Collection[str] | None) -> Any:
    """The rows of tables with different columns, each loaded alone. Raises `DataError`, which names the file that
    cannot be read or whose column is of another type."""
    from datasets import concatenate_datasets

    tables: list[Any] = []
    known: dict[str, tuple[str, Path]] = {}
    for path in files:
        try:
            columns = header(kind, path) if kind == "parquet" else {}
            kept = None if used is None else [name for name in columns if name in used]
            table = _built(kind, [path], kept)
        except DataError:
            raise
        except Exception as error:
            raise _unreadable(kind, path, error) from error
        types = column_types(table.features)
        kept = [name for name in types if used is None or name in used]
        if not kept:
            raise DataError(f"{path}: has no column {' or '.join(used or ())}")
        tables.append(table.select_columns(kept))
        for name in kept:
            before, first = known.setdefault(name, (types[name], path))
            if "null" not in (before, types[name]) and types[name] != before:
                raise DataError(
                    f'{path}: column "{name}" holds {types[name]}; in {first} it holds {before}'
                )
    return concatenate_datasets(tables)


def load_texts(kind: str, files: Sequence[Path], plain: Sequence[Path], column: str) -> Any:
    """One column of JSON or JSON Lines as the texts that the file has. `plain` are the files to read if `files` are
    compressed. Raises `DataError`, which names the row that holds something else."""
    from datasets import Dataset, Features, Value

    try:
        return Dataset.from_generator(
            records.texts,
            features=Features({column: Value("string")}),
            gen_kwargs={
                "kind": kind,
                "files": json_lines.stamps(files),
                "plain": tuple(map(str, plain)),
                "column": column,
            },
        )
    except Exception as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise _unreadable(kind, files[0], error) from error


def _repaired_lines(
    files: Sequence[Path], used: Collection[str] | None, columns: Collection[str] | None = None
) -> Any:
    """JSON lines that the table reader refused, one by one: all fields, or those that are `used` if others do not fit
    into columns. Raises `DataError`, which names the line."""
    from datasets import Dataset

    options: dict[str, Any] = {"files": json_lines.stamps(files)}
    if columns is not None:
        options["columns"] = tuple(columns)
    try:
        return Dataset.from_generator(json_lines.rows, gen_kwargs=options)
    except Exception as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        if used is None or columns is not None:
            raise _unreadable("jsonl", files[0], error) from error
        return _repaired_lines(files, used, used)


def _unreadable(kind: str, path: Path, error: Exception) -> DataError:
    from datasets import config

    where = config.HF_DATASETS_CACHE
    if cause_of(error) == NoRoomError.cause:
        return NoRoomError(f"{path}: no room for its table in {where}; free some there")
    inner = error.__cause__ or error
    if isinstance(inner, OSError) and inner.filename not in (None, str(path)):
        why = f"its table cannot be written to {where}: {inner.strerror}"
        return DataError(f"{path}: {why}; HF_DATASETS_CACHE names another folder")
    return DataError(f"{path}: cannot be read as {kind}: {reason(error)}")


def reason(error: BaseException) -> str:
    """Why a table cannot be read, in one line of at most 300 characters."""
    # The table reader wraps the cause in an error without information.
    inner = error.__cause__ or error
    text = " ".join(str(inner).split()) or type(inner).__name__
    return text if len(text) <= 300 else text[:300] + " …"
