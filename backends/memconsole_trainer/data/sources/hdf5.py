"""Reads HDF5 files: rows of token ids, or a column of texts."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.plan import PlanError, printable
from memconsole.plan.tasks.language import MASKED
from memconsole.regular_file import check_regular
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.hashes import (
    BlockHashes,
    Content,
    DataHashes,
    array_content,
)
from memconsole_trainer.data.sources.hdf5_links import refuse_other_files

_CACHE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20


class Hdf5Dataset:
    """One dataset of one file. The file is opened on first use, and each process opens its own
    handle."""

    def __init__(
        self, path: Path, name: str, max_examples: int | None, hashed_rows: int | None = None
    ) -> None:
        """The data read are hashed in blocks of `hashed_rows` rows (default `block_size`), which must always be
        read whole."""
        import h5py

        self.path = path
        self.name = name
        self._handle: Any = None
        with _naming(path):
            dataset = self._dataset()
        self.shape: tuple[int, ...] = tuple(int(n) for n in dataset.shape)
        if not self.shape or dataset.dtype.kind == "V":
            raise DataError(f"{path}: {name} is not an array of rows")
        self.dtype = str(dataset.dtype)
        self.kind: str = dataset.dtype.kind
        """The kind of the numbers, as NumPy's `dtype.kind`."""
        self.is_text: bool = h5py.check_string_dtype(dataset.dtype) is not None
        """Whether the values are strings, of one length or of several."""
        rows = self.shape[0]
        self.count: int | None = rows if max_examples is None else min(rows, max_examples)
        row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=np.int64))
        # A block is a whole number of chunks: reading part of a compressed chunk costs all of it.
        chunk = int(dataset.chunks[0]) if dataset.chunks else 1
        self.block_size = chunk * max(1, _BLOCK_BYTES // max(row_bytes * chunk, 1))
        self.block_size = max(1, min(self.block_size, rows))
        self._hashed_rows = hashed_rows or self.block_size
        self.block_hashes = BlockHashes(-(-self.count // self._hashed_rows), self._content)
        self.hashes = DataHashes([path], {name: self.block_hashes})
        digest = hashlib.sha256(f"{name}/{dataset.shape}/{dataset.dtype}".encode())
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        for start in {0, rows // 2, max(rows - 1, 0)}:
            digest.update(repr(self.read_rows(start, min(start + 1, rows)).tolist()).encode())
        self.fingerprint = digest.hexdigest()

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read rows `start` to `stop` unchanged. Raises `DataError`."""
        values = self._rows(start, stop)
        self._hash(start, stop, values)
        return values

    def read_into(
        self, start: int, stop: int, into: NDArray[Any], steps: int | None = None
    ) -> None:
        """Read rows `start` to `stop` into an array, without a copy if it has the dataset's type; of each row the
        last `steps` of the first axis, if given. Raises `DataError`."""
        if into.shape[1:] != self.shape[1:] or into.dtype != self.dtype:
            into[...] = self.read_rows(start, stop)[
                :, slice(None if steps is None else -steps, None)
            ]
            return
        with _naming(self.path, f"rows {start:,} to {stop - 1:,} of {self.name}"):
            self._dataset().read_direct(into, slice(start, stop))
        self._hash(start, stop, into)

    def _hash(self, start: int, stop: int, values: NDArray[Any]) -> None:
        """Hash the blocks that lie within rows `start` to `stop`."""
        size = self._hashed_rows
        for block in range(-(-start // size), -(-stop // size)):
            first, last = block * size, min((block + 1) * size, self.count or 0)
            if last <= stop:
                self.block_hashes.take(block, array_content(values[first - start : last - start]))

    def _content(self, block: int) -> Content:
        start = block * self._hashed_rows
        return array_content(self._rows(start, min(start + self._hashed_rows, self.count or 0)))

    def _rows(self, start: int, stop: int) -> NDArray[Any]:
        with _naming(self.path, f"rows {start:,} to {stop - 1:,} of {self.name}"):
            values: NDArray[Any] = self._dataset()[start:stop]
            return values

    def of_file(self, read: Callable[[Any], Any]) -> Any:
        """Call `read` with the open file and return its result. Raises `DataError`."""
        with _naming(self.path):
            return read(self._dataset().file)

    def _dataset(self) -> Any:
        if self._handle is None:
            self._handle = _open(self.path)
        return self._handle[self.name]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}


class Hdf5Texts(Hdf5Dataset):
    """A 1-D dataset of strings: each row is one document."""

    total_bytes: int | None = None

    def read(self, start: int, stop: int) -> list[str]:
        texts = self.read_rows(start, stop)
        return [t.decode("utf-8", "replace") if isinstance(t, bytes) else str(t) for t in texts]


class TokenRows(Hdf5Dataset):
    """A 2-D dataset of integers: each row is a row of token ids. Raises `DataError` if it is
    empty."""

    def __init__(self, path: Path, name: str, vocab_size: int, max_examples: int | None) -> None:
        super().__init__(path, name, max_examples)
        self._vocab_size = vocab_size
        self.width = int(self._dataset().shape[1])
        if not self.count or not self.width:
            raise DataError(f"{path}: {name} holds no tokens")

    def rows(self, start: int, stop: int) -> NDArray[np.int32]:
        """Read rows (stop - start, width). `MASKED` (-100) in place of a token says that there is nothing
        to learn. Raises `DataError` for other tokens outside the model's vocabulary."""
        values = self.read_rows(start, stop)
        wrong = ((values < 0) & (values != MASKED)) | (values >= self._vocab_size)
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            raise DataError(
                f"{self.path}: row {start + row} of {self.name} holds token "
                f"{int(values[row, column])}, the model's vocabulary ends at {self._vocab_size - 1}; "
                f"{MASKED} stands for a token that is not learned"
            )
        return values.astype(np.int32)


def open_hdf5(
    path: Path, column: str, vocab_size: int, max_examples: int | None
) -> Hdf5Texts | TokenRows:
    """Open the dataset of `path` to train on: the one named `column`, or the only one that fits.

    Raises `PlanError` that lists the datasets found, and `DataError` for a damaged file.
    """
    found = _usable(path)
    if column in found:
        name = column
    elif len(found) == 1:
        name = next(iter(found))
    else:
        listed = ", ".join(describe(path)) or "no datasets"
        problem = "several datasets fit" if found else "no dataset fits"
        raise PlanError(
            f"{path}: {problem}; name one in data.text_column: 2-D integers (token rows) or 1-D "
            f"strings (texts). The file holds {listed}",
            "data.text_column",
        )
    if found[name] == "tokens":
        return TokenRows(path, name, vocab_size, max_examples)
    return Hdf5Texts(path, name, max_examples)


def describe(path: Path) -> list[str]:
    """One line per dataset of the file: name, shape and type. Raises `DataError`."""
    with _naming(path), _open(path) as file:
        refuse_other_files(path, file)
        return [
            f"{name} {'x'.join(map(str, d.shape)) or 'scalar'} {d.dtype}"
            for name, d in _datasets(file)
        ]


def _usable(path: Path) -> dict[str, str]:
    import h5py

    found = {}
    with _naming(path), _open(path) as file:
        refuse_other_files(path, file)
        for name, dataset in _datasets(file):
            text = h5py.check_string_dtype(dataset.dtype) is not None
            if len(dataset.shape) == 2 and dataset.dtype.kind in "iu":
                found[name] = "tokens"
            elif len(dataset.shape) == 1 and text:
                found[name] = "text"
    return found


def _datasets(file: Any) -> list[tuple[str, Any]]:
    import h5py

    found: list[tuple[str, Any]] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found.append((name, item))

    file.visititems(visit)
    return found


def _open(path: Path) -> Any:
    import h5py

    check_regular(path)
    return h5py.File(path, "r", rdcc_nbytes=_CACHE_BYTES)


@contextlib.contextmanager
def _naming(path: Path, what: str = "") -> Iterator[None]:
    """Turn the many errors of a damaged file into a `DataError` that names it."""
    try:
        yield
    except (DataError, PlanError):
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        said = f"{what} cannot be read: {printable(str(error))}" if what else _problem(path, error)
        raise DataError(f"{path}: {said}") from None


def _problem(path: Path, error: Exception) -> str:
    """Why a file cannot be opened, for the person who named it."""
    stored = re.search(r"stored_eof = (\d+)", str(error))
    if not path.exists():
        return "the file does not exist; it may have been moved or deleted"
    if path.is_file() and path.stat().st_size == 0:
        return "the file is empty"
    if stored:
        return (
            f"the file is truncated: it has {path.stat().st_size:,} of {int(stored[1]):,} bytes; "
            "copy or make it again"
        )
    return f"not a readable HDF5 file: {printable(str(error))}"
