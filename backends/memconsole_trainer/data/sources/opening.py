"""Opens a plan's `data.source` as documents or token rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memconsole.plan import catalog
from memconsole.plan.catalog.encodings import HEAD_BYTES, is_binary
from memconsole.plan.catalog.entries import DatasetEntry
from memconsole.plan.catalog.folders import ROWS, TABLES, folder, plain_suffix
from memconsole.plan.catalog.sources import not_made
from memconsole.plan.data.check_records import advice
from memconsole.plan.machine import stdlib
from memconsole.plan.plan import DataChoice, Plan, PlanError, nearest
from memconsole.plan.templates.choice import template_of
from memconsole.regular_file import open_regular
from memconsole.units import GIB
from memconsole_trainer.data.sources.documents import (
    ColumnDocuments,
    DataError,
    Documents,
    FileDocuments,
    NoRoomError,
    StreamDocuments,
)
from memconsole_trainer.data.sources.hdf5 import TokenRows, open_hdf5
from memconsole_trainer.data.sources.json_texts import json_texts
from memconsole_trainer.data.sources.records import (
    JsonLines,
    JsonObjects,
    RecordDocuments,
    Records,
    StreamRecords,
    TableRecords,
)
from memconsole_trainer.data.sources.tables import (
    MIXED,
    TEXT_TYPES,
    column_types,
    header,
    load_table,
    load_texts,
    reason,
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
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if is_binary(head):
        raise DataError(f"{path}: holds binary data, not text")
    return _nonempty(FileDocuments([path], data.max_examples), str(path))


def _records(
    entry: DatasetEntry, template: Template, data: DataChoice, tick: Callable[[], None]
) -> Documents:
    """The entry's records as texts of a template."""
    most = data.max_examples

    def made(records: Records) -> Documents:
        return _nonempty(RecordDocuments(records, template), data.source)

    if entry.kind == "hub":
        table, _ = _of_hub(entry, data)
        if data.streaming:
            return StreamRecords(table, template, f"hf://{entry.where}", most)
        found = TableRecords(table, f"hf://{entry.where}", most)
    else:
        path = Path(entry.where).expanduser()
        inside = folder(path) if path.is_dir() else None
        kind = inside.format if inside is not None else TABLES[plain_suffix(path.name)]
        files = list(inside.files) if inside is not None else [path]
        if kind == "jsonl":
            return made(JsonLines(files, most, _plain(files, data, tick)))
        if kind == "json":
            # A table would change their values: it takes dates for times, and 1 for 1.0 where another row has a
            # fraction. It is for files that hold something else than objects, such as columns.
            with suppress(DataError):
                return made(JsonObjects(files, most, _plain(files, data, tick)))
        table = open_table(kind, files, data, tick, template.columns)
        found = TableRecords(table, str(files[0]), most, files)
    return made(found)


def _plain(files: Sequence[Path], data: DataChoice, tick: Callable[[], None]) -> list[Path]:
    """The files unpacked, where they are compressed. Raises `DataError`."""
    return [unpacked(path, data.cache_gib * GIB, tick) for path in files]


def open_table(
    kind: str,
    files: Sequence[Path],
    data: DataChoice,
    tick: Callable[[], None] = lambda: None,
    used: Collection[str] | None = None,
    only: bool = False,
) -> Any:
    """`load_table` of files that may be compressed."""
    plain = _plain(files, data, tick)
    with _named(files, plain):
        return load_table(kind, plain, used, only)


@contextmanager
def _named(files: Sequence[Path], plain: Sequence[Path]) -> Iterator[None]:
    """Errors name the compressed files and not the unpacked ones."""
    try:
        yield
    except DataError as error:
        words = str(error)
        for path, inside in zip(files, plain, strict=True):
            words = words.replace(str(inside), str(path))
        error.args = (words,)
        raise


def _table(
    kind: str, files: list[Path], column: str, data: DataChoice, tick: Callable[[], None]
) -> Documents:
    if kind == "jsonl":
        found = json_texts(files, _plain(files, data, tick), column, data.max_examples)
        if found is not None:
            return found
    names = None
    if kind in ("csv", "parquet"):
        plain = _plain(files, data, tick)
        with _named(files, plain):
            headers = [header(kind, path) for path in plain]
        for path, columns in zip(files, headers, strict=True):
            check_column(columns, column, str(path))
        names = list(headers[0]) if kind == "parquet" else None
    table = open_table(kind, files, data, tick, [column], only=True)
    guessed = _is_guessed(column_types(table.features).get(column, ""))
    if kind in ("json", "jsonl") and guessed and not isinstance(table[0][column], list | dict):
        try:
            table = load_texts(kind, files, _plain(files, data, tick), column)
        except NoRoomError:
            raise
        except DataError as error:
            raise PlanError(str(error), "data.text_column") from error
    return _columns(table, column, data, str(files[0]), files, names)


def _is_guessed(kind: str) -> bool:
    """Whether a column of JSON may hold texts that were taken for something else: dates, or texts beside values of
    other types."""
    return kind.startswith("timestamp") or kind == MIXED


def _columns(
    table: Any,
    column: str,
    data: DataChoice,
    where: str,
    files: Sequence[Path] = (),
    names: Sequence[str] | None = None,
) -> Documents:
    check_column(column_types(table.features), column, where)
    return _nonempty(ColumnDocuments(table, column, data.max_examples, files, names), where)


def check_column(columns: dict[str, str], column: str, where: str) -> None:
    """Raise `PlanError` unless `column` is one of `columns` (name to type) and holds text."""
    listed = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
    if column not in columns:
        raise PlanError(
            f'{where}: no column "{column}"{nearest(column, columns)}; {advice(columns)}',
            "data.text_column",
        )
    if columns[column] not in TEXT_TYPES:
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
            f"{name}: cannot be opened ({reason(error)}); without a network use a local file"
        ) from error
    if first is None:
        raise DataError(f"{name}: holds no rows")
    return table, first


def _nonempty(documents: Documents, where: str) -> Documents:
    if documents.count == 0:
        raise DataError(f"{where}: holds no text")
    return documents
