"""Opens a plan's `data.source` as documents or token rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memconsole.plan import catalog
from memconsole.plan.catalog.entries import DatasetEntry
from memconsole.plan.catalog.folders import ROWS, TABLES, folder, plain_suffix
from memconsole.plan.catalog.sources import not_made
from memconsole.plan.data.check_records import advice
from memconsole.plan.machine import stdlib
from memconsole.plan.plan import DataChoice, Plan, PlanError, nearest
from memconsole.plan.templates.choice import template_of
from memconsole.regular_file import check_regular, open_regular
from memconsole.units import GIB
from memconsole_trainer.data.sources import csv_cells, json_lines
from memconsole_trainer.data.sources.documents import (
    ColumnDocuments,
    DataError,
    Documents,
    FileDocuments,
    StreamDocuments,
)
from memconsole_trainer.data.sources.hdf5 import TokenRows, open_hdf5
from memconsole_trainer.data.sources.records import (
    JsonLines,
    RecordDocuments,
    Records,
    StreamRecords,
    TableRecords,
)
from memconsole_trainer.data.sources.unpacked import unpacked

if TYPE_CHECKING:
    from memconsole.plan.templates.template import Template


def open_source(
    plan: Plan, vocab_size: int, tick: Callable[[], None] = lambda: None
) -> Documents | TokenRows:
    """Open what `plan.data.source` names. `tick` is called while a file is unpacked; it may raise.

    Raises `PlanError` if it does not exist, and `DataError` if it exists but cannot be read.
    """
    data = plan.data
    entry = catalog.dataset(plan)
    if entry.kind == "made":
        raise not_made(entry)
    template = template_of(plan)
    if template is not None:
        return _records(entry, template, data, tick)
    if entry.kind == "stdlib":
        return _nonempty(FileDocuments(stdlib.files(), data.max_examples), data.source)
    column = data.text_column
    if column == DataChoice().text_column and entry.text_column:
        column = entry.text_column
    if entry.kind == "hub":
        return _hub(entry, column, data)
    return open_path(Path(entry.where).expanduser(), column, vocab_size, data, tick)


def open_path(
    path: Path,
    column: str,
    vocab_size: int,
    data: DataChoice,
    tick: Callable[[], None] = lambda: None,
) -> Documents | TokenRows:
    """Open a file or directory. Raises what `open_source` raises."""
    if path.is_dir():
        found = folder(path)
        assert found is not None
        if found.format == "text":
            return _nonempty(FileDocuments(found.files, data.max_examples), str(path))
        return _table(found.format, list(found.files), column, data, tick)
    if not path.is_file():
        raise PlanError(f'data.source = "{path}": no such file or directory', "data.source")
    suffix = plain_suffix(path.name)
    if suffix in ROWS:
        return open_hdf5(path, column, vocab_size, data.max_examples)
    if suffix in TABLES:
        return _table(TABLES[suffix], [path], column, data, tick)
    try:
        with open_regular(path) as file:
            head = file.read(4096)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if b"\0" in head:
        raise DataError(f"{path}: holds binary data, not text")
    return _nonempty(FileDocuments([path], data.max_examples), str(path))


def _records(
    entry: DatasetEntry, template: Template, data: DataChoice, tick: Callable[[], None]
) -> Documents:
    """The entry's records as texts of a template."""
    most = data.max_examples
    if entry.kind == "hub":
        table, _ = _of_hub(entry, data)
        if data.streaming:
            return StreamRecords(table, template, f"hf://{entry.where}", most)
        found: Records = TableRecords(table, f"hf://{entry.where}", most)
    else:
        path = Path(entry.where).expanduser()
        inside = folder(path) if path.is_dir() else None
        kind = inside.format if inside is not None else TABLES[plain_suffix(path.name)]
        files = list(inside.files) if inside is not None else [path]
        if kind == "jsonl":
            found = JsonLines(files, most, _plain(files, data, tick))
        else:
            table = open_table(kind, files, data, tick)
            known = csv_cells.guessed(_plain(files[:1], data, tick)[0]) if kind == "csv" else None
            found = TableRecords(table, str(files[0]), most, files, known)
    return _nonempty(RecordDocuments(found, template), data.source)


def _plain(files: Sequence[Path], data: DataChoice, tick: Callable[[], None]) -> list[Path]:
    """The files unpacked, where they are compressed. Raises `DataError`."""
    return [unpacked(path, data.cache_gib * GIB, tick) for path in files]


def open_table(
    kind: str,
    files: Sequence[Path],
    data: DataChoice,
    tick: Callable[[], None] = lambda: None,
) -> Any:
    """`load_table` of files that may be compressed. Errors name these files and not the unpacked ones."""
    plain = _plain(files, data, tick)
    try:
        return load_table(kind, plain)
    except DataError as error:
        words = str(error)
        for path, inside in zip(files, plain, strict=True):
            words = words.replace(str(inside), str(path))
        raise DataError(words) from error


def load_table(kind: str, files: list[Path]) -> Any:
    """Load `files`, tables of one format, as a memory-mapped `datasets.Dataset`. Raises
    `DataError`.

    A name is the name of one file, whatever characters it has. `datasets.load_dataset` would take
    it for a pattern, and would report each load to a server.
    """
    for path in files:
        try:
            check_regular(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    import datasets  # takes 1.5 s, so only when a table is read
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    form = "json" if kind == "jsonl" else kind
    names = [str(p) for p in files]
    for name in names:
        if "::" in name:
            raise DataError(f'{name}: "::" in the name of a table cannot be read; rename it')
    try:
        options = csv_cells.options(files[0]) if kind == "csv" else {}
        # The library keeps what it has read in its cache, under a hash of names, sizes and times.
        stamps = [(str(s.st_size), str(s.st_mtime_ns)) for s in map(Path.stat, files)]
        module = importlib.import_module(f"datasets.packaged_modules.{form}.{form}")
        builder = getattr(module, form.capitalize())(
            data_files=DataFilesDict({"train": DataFilesList(names, stamps)}),
            hash=datasets.__version__,
            **options,
        )
        builder.download_and_prepare()
        return builder.as_dataset(split="train")
    except Exception as error:
        if kind == "jsonl":
            return _repaired_lines(files)
        raise DataError(f"{names[0]}: cannot be read as {kind}: {_reason(error)}") from error


def _repaired_lines(files: list[Path]) -> Any:
    """JSON lines that the table reader refused, one by one. Raises `DataError`, which names the
    line."""
    from datasets import Dataset

    try:
        made = json_lines.stamps(files)
        return Dataset.from_generator(json_lines.rows, gen_kwargs={"files": made})
    except Exception as error:
        found = error.__cause__ if isinstance(error.__cause__, DataError) else None
        if found is not None:
            raise found from None
        raise DataError(f"{files[0]}: cannot be read as jsonl: {_reason(error)}") from error


def column_types(features: Any) -> dict[str, str]:
    """The type of each column of a table, by name."""
    return {name: str(getattr(feature, "dtype", "nested")) for name, feature in features.items()}


def _table(
    kind: str, files: list[Path], column: str, data: DataChoice, tick: Callable[[], None]
) -> Documents:
    return _columns(open_table(kind, files, data, tick), column, data, str(files[0]), files)


def _columns(
    table: Any, column: str, data: DataChoice, where: str, files: Sequence[Path] = ()
) -> Documents:
    check_column(column_types(table.features), column, where)
    return _nonempty(ColumnDocuments(table, column, data.max_examples, files), where)


def check_column(columns: dict[str, str], column: str, where: str) -> None:
    """Raise `PlanError` unless `column` is one of `columns` (name to type) and holds text."""
    listed = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
    if column not in columns:
        raise PlanError(
            f'{where}: no column "{column}"{nearest(column, columns)}; {advice(columns)}',
            "data.text_column",
        )
    if columns[column] not in ("string", "large_string", "string_view"):
        raise PlanError(
            f'{where}: column "{column}" holds {columns[column]}, not text; columns: {listed}',
            "data.text_column",
        )


def _hub(entry: DatasetEntry, column: str, data: DataChoice) -> Documents:
    table, first = _of_hub(entry, data)
    name = f"hf://{entry.where}"
    if not data.streaming:
        return _columns(table, column, data, name)
    kinds = {
        k: "string" if v is None or isinstance(v, str) else type(v).__name__
        for k, v in first.items()
    }
    if table.features is not None:
        kinds = column_types(table.features)
    check_column(kinds, column, name)
    return StreamDocuments(table, column, name, data.max_examples)


def _of_hub(entry: DatasetEntry, data: DataChoice) -> tuple[Any, Any]:
    """A hub dataset, streamed if the plan says so, and its first row. Raises `DataError`."""
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    split = data.split if data.split != DataChoice().split else entry.split or data.split
    name = f"hf://{entry.where}"
    try:
        table = load_dataset(entry.where, entry.config, split=split, streaming=data.streaming)
        first = next(iter(table), None)
    except Exception as error:
        raise DataError(
            f"{name}: cannot be opened ({_reason(error)}); without a network use a local file"
        ) from error
    if first is None:
        raise DataError(f"{name}: holds no rows")
    return table, first


def _nonempty(documents: Documents, where: str) -> Documents:
    if documents.count == 0:
        raise DataError(f"{where}: holds no text")
    return documents


def _reason(error: BaseException) -> str:
    # The table reader wraps the cause in an error without information.
    inner = error.__cause__ or error
    text = " ".join(str(inner).split()) or type(inner).__name__
    return text if len(text) <= 300 else text[:300] + " …"
