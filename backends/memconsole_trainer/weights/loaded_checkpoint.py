"""Reads a verified checkpoint, one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memconsole import typed_json
from memconsole.runs.record.checkpoints.manifest import MANIFEST, STATE, read_json, step_of
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.weights import tensorfile

MOST_OPEN_FILES = 128
"""A process may have 256 files open on macOS, and 1,024 on Linux."""


class LoadedCheckpoint:
    """A verified checkpoint. Implements `StateSource`: tensors are read one at a time. With `keep_open` it can be read
    after its run has deleted it, up to `MOST_OPEN_FILES` files of it.

    Raises `FileNotFoundError` if it was deleted.
    """

    def __init__(self, path: Path, *, keep_open: bool = False) -> None:
        self.path = path
        self.state: dict[str, Any] = read_json(path / STATE)
        self._files: dict[str, tensorfile.TensorFile] = {}
        # A folder that is being deleted would list only some of its files.
        listed = read_json(path / MANIFEST)["files"]
        for number, name in enumerate(sorted(n for n in listed if n.endswith(".safetensors"))):
            opened = tensorfile.TensorFile(path / name, hold=keep_open and number < MOST_OPEN_FILES)
            self._files.update((tensor, opened) for tensor in opened.names())

    @property
    def step(self) -> int:
        return step_of(self.path)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of what must not change. Raises `DataError`."""
        fingerprints: dict[str, str] = self.part("fingerprints", dict[str, str])
        return fingerprints

    def part(self, name: str, kind: Any) -> Any:
        """One part of the state, of type `kind`. Raises `DataError` if it is missing or has another type."""
        try:
            return typed_json.convert(self.state.get(name), kind)
        except msgspec.ValidationError as error:
            where = f"{self.path.name}/{STATE}: {name}"
            raise DataError(f"{where}: {error}; this checkpoint cannot be used") from None

    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> NDArray[np.generic]:
        """Raises KeyError for a name that was not saved, and `DataError` if its file was deleted meanwhile."""
        try:
            return self._files[name].tensor(name)
        except FileNotFoundError:
            raise DataError(f"{self.path} was deleted while it was read") from None
