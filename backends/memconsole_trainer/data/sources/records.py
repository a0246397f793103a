"""Rows that are records: lines of JSON files, or rows of a table; and the texts that a template
makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from memconsole.plan.templates.chat import RecordError
from memconsole.plan.templates.rendered import Rendered
from memconsole.regular_file import open_regular
from memconsole_trainer.data.sources import json_lines, json_objects
from memconsole_trainer.data.sources.documents import BlockDocuments, DataError, StreamDocuments

if TYPE_CHECKING:
    from memconsole.plan.templates.template import Template

CHUNK_BYTES = 16 << 20


class Record(NamedTuple):
    """One record and its place, for messages."""

    where: str
    fields: Mapping[str, Any]


class Records(Protocol):
    """Records numbered from 0 whose order never changes."""

    count: int
    total_bytes: int | None
    fingerprint: str
    """Changes with the names and lengths of the records, and with some of their content."""
    files: Sequence[Path]
    """The files that hold them; empty if they are elsewhere."""

    def read(self, start: int, stop: int) -> list[Record]:
        """Read records `start` to `stop`. Raises `DataError`."""
        ...


class JsonLines:
    """The lines of JSON Lines files. The offset of each line is kept, so that any line can be read
    directly. Empty lines are left out."""

    unit = "line"
    """How messages name a record, before its number."""

    def __init__(
        self,
        files: Sequence[Path],
        max_examples: int | None = None,
        plain: Sequence[Path] | None = None,
    ) -> None:
        """`plain` are the files to read if `files` are compressed."""
        digest = hashlib.sha256()
        self.files = files
        self._plain = files if plain is None else plain
        self._files: list[tuple[Path, Any, Any]] = []
        """Path, bytes where the lines begin and end (n, 2), and line numbers from 1 (n,)."""
        self.count = self.all_lines = 0
        for path, inside in zip(files, self._plain, strict=True):
            try:
                bounds, numbers = self._places(inside)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from None
            digest.update(f"{path.name}\0".encode("utf-8", "surrogateescape"))
            digest.update(bounds)
            self.all_lines += len(bounds)
            left = None if max_examples is None else max_examples - self.count
            self._files.append((path, bounds[:left], numbers[:left]))
            self.count += len(self._files[-1][1])
        self._firsts = np.cumsum([0, *(len(numbers) for _, _, numbers in self._files)])
        self.total_bytes: int | None = sum(
            int((bounds[:, 1] - bounds[:, 0]).sum()) for _, bounds, _ in self._files
        )
        self.fingerprint = digest.hexdigest()

    def _places(self, path: Path) -> tuple[Any, Any]:
        """Where the records of a file begin and end, and their numbers."""
        return _lines(path)

    def read(self, start: int, stop: int) -> list[Record]:
        return [
            Record(where, json_lines.parsed(line, where))
            for line, path, number in self.lines(start, stop)
            for where in (f"{path}: {self.unit} {number:,}",)
        ]

    def lines(self, start: int, stop: int) -> Iterator[tuple[bytes, Path, int]]:
        """Records `start` to `stop` as they are written, with the file and the number of each in it. Raises `DataError`."""
        while start < stop:
            number = int(np.searchsorted(self._firsts, start, side="right")) - 1
            first, until = int(self._firsts[number]), min(stop, int(self._firsts[number + 1]))
            yield from self._of_file(number, start - first, until - first)
            start = until

    def _of_file(self, number: int, start: int, stop: int) -> Iterator[tuple[bytes, Path, int]]:
        path, bounds, numbers = self._files[number]
        begin, end = int(bounds[start, 0]), int(bounds[stop - 1, 1])
        try:
            with open_regular(self._plain[number]) as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if len(data) != end - begin:
            raise DataError(f"{path}: became shorter while it was being read")
        places = (bounds[start:stop] - begin).tolist()
        for (first, last), line in zip(places, numbers[start:stop], strict=True):
            yield data[first:last], path, int(line)


class JsonObjects(JsonLines):
    """The objects of JSON files: the elements of an array, or objects one after another."""

    unit = "row"

    def _places(self, path: Path) -> tuple[Any, Any]:
        bounds = json_objects.places(path)
        if bounds is None:
            raise DataError(f"{path}: holds something else than objects")
        return bounds, range(1, len(bounds) + 1)


class TableRecords:
    """The rows of a table that `datasets` maps from disk."""

    total_bytes: int | None = None

    def __init__(
        self,
        table: Any,
        where: str,
        max_examples: int | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        self._table, self._where, self.files = table, where, files
        rows = len(table)
        self.count = rows if max_examples is None else min(rows, max_examples)
        digest = hashlib.sha256(f"{rows}/{table.column_names}".encode())
        for index in {0, self.count // 2, max(self.count - 1, 0)} if self.count else ():
            digest.update(str(table[index]).encode("utf-8", "replace"))
        self.fingerprint = digest.hexdigest()

    def read(self, start: int, stop: int) -> list[Record]:
        columns = self._table[start:stop]
        rows = zip(*columns.values(), strict=True)
        return [
            Record(f"{self._where}: row {start + i + 1:,}", dict(zip(columns, row, strict=True)))
            for i, row in enumerate(rows)
        ]


class RecordDocuments(BlockDocuments):
    """Records as texts. Implements `Documents`."""

    block_size = 256
    """Neighbouring records are packed into rows together."""

    def __init__(self, records: Records, template: Template) -> None:
        self._records, self.template = records, template
        self.total_bytes = records.total_bytes
        super().__init__(records.count, records.fingerprint, records.files, "records")

    def texts(self, start: int, stop: int) -> list[str]:
        return [rendered(self.template, record) for record in self._records.read(start, stop)]

    def records(self, numbers: Iterable[int]) -> Iterator[Record]:
        """The records of these numbers."""
        for number in numbers:
            yield from self._records.read(number, number + 1)


class StreamRecords(StreamDocuments):
    """Records of a stream as texts."""

    block_size = RecordDocuments.block_size

    def __init__(self, stream: Any, template: Template, name: str, most: int | None) -> None:
        super().__init__(stream, "", name, most)
        self.template = template

    def _text(self, number: int, row: Any) -> str:
        return rendered(self.template, self._record(number, row))

    def records(self, numbers: Iterable[int]) -> Iterator[Record]:
        """The records of these rising numbers."""
        wanted = iter(numbers)
        number = next(wanted, None)
        with self._errors():
            for index, row in self._rows():
                if number is None:
                    return
                if index == number:
                    yield self._record(index, row)
                    number = next(wanted, None)

    def _record(self, number: int, row: Any) -> Record:
        return Record(f"{self._name}: row {number + 1:,}", row)


def rendered(template: Template, record: Record) -> Rendered:
    """The record as text. Raises `DataError` that names its place."""
    try:
        return template.render(record.fields)
    except RecordError as error:
        raise DataError(f"{record.where} {error}") from None


def texts(
    kind: str, files: Sequence[json_lines.Stamp], plain: Sequence[str], column: str
) -> Iterator[dict[str, str | None]]:
    """One field of the records of JSON or JSON Lines files, for a table with this column. Raises `DataError` for a
    field that is neither text nor missing."""
    reader = JsonLines if kind == "jsonl" else JsonObjects
    found = reader([Path(name) for name, _, _ in files], plain=[Path(name) for name in plain])
    size = RecordDocuments.block_size
    for start in range(0, found.count, size):
        for record in found.read(start, min(start + size, found.count)):
            text = record.fields.get(column)
            if text is not None and not isinstance(text, str):
                raise DataError(
                    f'{record.where}: field "{column}" holds {text!s:.40}, expected text'
                )
            yield {column: text}


def _lines(path: Path) -> tuple[Any, Any]:
    """The byte offsets at which the non-empty lines of a file begin and end, and their line numbers. For ten
    million lines this takes less than a second."""
    parts, position, last = [], 0, b"\n"
    with open_regular(path) as file:
        while data := file.read(CHUNK_BYTES):
            parts.append(np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + position)
            position += len(data)
            last = data[-1:]
    ends = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if last != b"\n":
        ends = np.append(ends, position)
    bounds = np.empty((len(ends), 2), np.int64)
    bounds[:1, 0] = 0
    np.add(ends[:-1], 1, out=bounds[1:, 0])
    bounds[:, 1] = ends
    kept = bounds[:, 1] > bounds[:, 0]
    if kept.all():
        return bounds, range(1, len(bounds) + 1)
    return bounds[kept], np.flatnonzero(kept) + 1
