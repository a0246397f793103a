"""Sources of texts in a fixed order: files cut into pieces, columns of tables, and streams."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memconsole.plan.catalog.encodings import HEAD_BYTES, encoding_of, unit_bytes
from memconsole.plan.catalog.sources import PIECE_BYTES
from memconsole.regular_file import open_regular
from memconsole_trainer.data.sources.hashes import (
    BlockHashes,
    Content,
    DataHashes,
    text_content,
)

LONE_PIECES = 16
"""A single file is cut into about this many pieces, unless they become too long or too short."""
LEAST_PIECE_BYTES = 256
LOOK_BYTES = 2048
"""Bytes of a long piece that are read first to find the end of a paragraph."""


class DataError(ValueError):
    """Data cannot be read or has changed. The message is one line that names the file or source."""

    cause = "bad_data"


class NoRoomError(DataError):
    """The disk is full that holds what is made from the data, such as a table. The data may be good."""

    cause = "disk"


class Documents(Protocol):
    """Texts numbered from 0 whose order never changes."""

    count: int | None
    """Number of texts; None for a stream, whose length is known only at its end."""
    block_size: int
    """Number of neighbouring texts to read together, because that is cheap."""
    total_bytes: int | None
    """Approximate UTF-8 bytes of all texts; None if unknown."""
    fingerprint: str
    """Changes with the names and lengths of the data, and with some of its content."""
    hashes: DataHashes
    """Hashes of everything that was read so far."""

    @property
    def block_hashes(self) -> BlockHashes | None:
        """The hashes of the texts, by blocks of `block_size`; None for a stream."""
        ...

    def read(self, start: int, stop: int) -> list[str]:
        """Read texts `start` to `stop`. Raises `DataError`."""
        ...


class FileDocuments:
    """Plain files. A file is one document, or several if it is longer than `PIECE_BYTES` or the
    only file.

    A piece ends after a paragraph or a line if possible, and never inside a character. Files are UTF-8, or UTF-16 or
    UTF-32 if they begin with its byte order mark. The mark is no text.
    """

    block_size = 1

    def __init__(self, files: Sequence[Path], max_examples: int | None = None) -> None:
        self._pieces: list[tuple[Path, int, int]] = []
        self._encodings: dict[Path, str] = {}
        """Those that are not UTF-8."""
        numbers: list[int] = []
        digest = hashlib.sha256()
        for number, path in enumerate(files):
            try:
                with open_regular(path) as file:
                    head = file.read(HEAD_BYTES)
                encoding = encoding_of(head)
                cuts = _cuts(path, len(files) == 1, encoding)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from None
            digest.update(f"{path.name}\0{cuts}\0".encode("utf-8", "surrogateescape") + head)
            if encoding != "utf-8":
                digest.update(encoding.encode())
                self._encodings[path] = encoding
            elif head.startswith(codecs.BOM_UTF8):
                digest.update(b"without its mark")  # older runs read it as text
            self._pieces.extend(zip([path] * len(cuts), cuts, cuts[1:], strict=False))
            numbers.extend([number] * (len(cuts) - 1))
            if max_examples is not None and len(self._pieces) >= max_examples:
                del self._pieces[max_examples:]
                break
        self.count: int | None = len(self._pieces)
        sizes = [(b - a) // unit_bytes(self._encoding(path)) for path, a, b in self._pieces]
        self.sizes = np.array(sizes, dtype=np.int64)
        """Bytes of each piece; of UTF-16 and UTF-32, the number of code units."""
        self.files = np.array(numbers[: len(self._pieces)], dtype=np.int64)
        """Number of the file that each piece belongs to."""
        self.total_bytes: int | None = int(self.sizes.sum())
        self.fingerprint = digest.hexdigest()
        self.block_hashes = BlockHashes(self.count, self._content)
        used = files[: numbers[-1] + 1 if numbers else 0]
        self.hashes = DataHashes(used, {"text": self.block_hashes})

    def read(self, start: int, stop: int) -> list[str]:
        texts = []
        for index in range(start, stop):
            data = self._piece(index)
            self.block_hashes.take(index, (data,))
            path, first, _ = self._pieces[index]
            text = data.decode(self._encoding(path), "replace")
            texts.append(text if first else text.removeprefix("\ufeff"))
        return texts

    def _encoding(self, path: Path) -> str:
        return self._encodings.get(path, "utf-8")

    def _content(self, index: int) -> Content:
        return (self._piece(index),)

    def _piece(self, index: int) -> bytes:
        path, start, stop = self._pieces[index]
        try:
            with open_regular(path) as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if len(data) != stop - start:
            raise DataError(f"{path}: became shorter while it was being read")
        return data


class BlockDocuments:
    """Texts that can be read anywhere, in blocks of `block_size` that are hashed when they are read whole. A subclass has
    `texts`."""

    block_size: int
    total_bytes: int | None = None

    def __init__(self, count: int, fingerprint: str, files: Sequence[Path], part: str) -> None:
        """`count` texts of `files`; checkpoints keep their hashes under the name `part`."""
        self.count: int | None = count
        self.fingerprint = fingerprint
        self.block_hashes = BlockHashes(-(-count // self.block_size), self._block)
        self.hashes = DataHashes(files, {part: self.block_hashes})

    def texts(self, start: int, stop: int) -> list[str]:
        """Texts `start` to `stop`. Raises `DataError`."""
        raise NotImplementedError

    def fingerprint_of(self, count: int, description: str) -> str:
        """A fingerprint of the first, the middle and the last of `count` texts, and of a `description` of the data."""
        digest = hashlib.sha256(description.encode())
        for index in {0, count // 2, max(count - 1, 0)} if count else ():
            digest.update(self.texts(index, index + 1)[0].encode("utf-8", "replace"))
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> list[str]:
        texts = self.texts(start, stop)
        first, rest = divmod(start, self.block_size)
        if not rest and stop == min(start + self.block_size, self.count or 0):
            self.block_hashes.take(first, text_content(texts))
        return texts

    def _block(self, index: int) -> Content:
        start = index * self.block_size
        return text_content(self.texts(start, min(start + self.block_size, self.count or 0)))


class ColumnDocuments(BlockDocuments):
    """One text column of a table that `datasets` maps from disk, made from `files`."""

    block_size = 64

    def __init__(
        self,
        table: Any,
        column: str,
        max_examples: int | None,
        files: Sequence[Path] = (),
        names: Sequence[str] | None = None,
    ) -> None:
        """`names` are all columns of the files, if `table` has some of them only."""
        self._table = table
        self._column = column
        rows = len(table)
        count = rows if max_examples is None else min(rows, max_examples)
        fingerprint = self.fingerprint_of(count, f"{rows}/{column}/{names or table.column_names}")
        super().__init__(count, fingerprint, files, column)

    def texts(self, start: int, stop: int) -> list[str]:
        try:
            return [text or "" for text in self._table[start:stop][self._column]]
        except UnicodeDecodeError:
            # Tables are not checked for valid UTF-8 when they are read.
            column = self._table.with_format("arrow")[start:stop][self._column]
            found = column.cast("large_binary").to_pylist()
            return [(text or b"").decode("utf-8", "replace") for text in found]


class StreamDocuments:
    """Texts of a dataset that can only be read from front to back, such as one on the hub."""

    block_size = 64
    count: int | None = None
    total_bytes: int | None = None
    block_hashes: BlockHashes | None = None

    def __init__(self, stream: Any, column: str, name: str, max_examples: int | None) -> None:
        self._stream = stream
        self._column = column
        self._name = name
        self._max_examples = max_examples
        self.expected_count = max_examples if max_examples is not None else _published(stream)
        """Number of texts expected, if the source states it."""
        self.fingerprint = hashlib.sha256(f"{name}/{column}".encode()).hexdigest()
        self.hashes = DataHashes((), {})

    def iterate(self, start: int = 0) -> Iterator[str]:
        """Yield the texts from number `start` on. Raises `DataError`."""
        with self._errors():
            for number, row in self._rows(start):
                yield self._text(number, row)

    def _rows(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """The rows of the dataset from number `start` on, each with its number."""
        rows = self._stream.skip(start) if start else self._stream
        left = None if self._max_examples is None else max(0, self._max_examples - start)
        return enumerate(itertools.islice(rows, left), start)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the errors of reading and rendering rows into `DataError`."""
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self._name}: {type(error).__name__}: {error}") from error

    def _text(self, number: int, row: Any) -> str:
        return row[self._column] or ""

    def read(self, start: int, stop: int) -> list[str]:
        """Read texts `start` to `stop`. It skips all texts before them, so use it only near the
        beginning."""
        texts = []
        for text in self.iterate(start):
            texts.append(text)
            if len(texts) == stop - start:
                break
        return texts


def _published(stream: Any) -> int | None:
    """Number of rows according to a hub dataset's card."""
    try:
        return int(stream.info.splits[str(stream.split)].num_examples)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _cuts(path: Path, lone: bool, encoding: str) -> list[int]:
    """Byte offsets at which the pieces of `path` begin, followed by its size.

    A `lone` file gets at least about ten pieces, so that some can be held out.
    """
    size = path.stat().st_size
    length = PIECE_BYTES
    if lone:
        length = min(max(size // LONE_PIECES, LEAST_PIECE_BYTES), PIECE_BYTES)
        length -= length % unit_bytes(encoding)
    cuts = [0]
    with open_regular(path) as file:
        while size - cuts[-1] > 2 * length:
            target = cuts[-1] + length
            file.seek(target)
            ahead = file.read(min(LOOK_BYTES, length // 2))
            if b"\n\n" not in ahead:
                ahead += file.read(length // 2 - len(ahead))
            cuts.append(target + _break(ahead, encoding))
    return [*cuts, size]


def _break(ahead: bytes, encoding: str) -> int:
    """Offset to cut at: after a paragraph, else a line, else a word, else between characters."""
    unit = unit_bytes(encoding)
    for end in ("\n\n", "\n", " "):
        sign = end.encode(encoding)
        found = ahead.find(sign)
        while found > 0 and found % unit:
            found = ahead.find(sign, found + 1)
        if found >= 0:
            return found + len(sign)
    if unit > 1:  # the second half of a pair belongs to the character before it
        first = ahead[:unit].decode(encoding, "surrogatepass")
        return unit if "\udc00" <= first <= "\udfff" else 0
    return next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
