"""Atomic checkpoints: safetensors, JSON and a SHA-256 manifest, committed by rename.

    checkpoints/step-000000120/{model-00001.safetensors, optimizer-00001.safetensors, state.json, MANIFEST.json}

A run with averages of weights also has `ema-…`, and one in hybrid mode `hybrid-…`.

Everything is written and synced under `.tmp-…` first; the rename is the commit. Sizes and hashes
are verified before a file is parsed, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.runs.record.checkpoints.manifest import (
    DAMAGED,
    FORMAT,
    MANIFEST,
    REPLACED,
    STATE,
    step_of,
    verify,
)
from memconsole.runs.record.directory import CHECKPOINT_NAME
from memconsole.runs.record.files import sync_directory
from memconsole.runs.record.spares import FULL
from memconsole.units import format_bytes
from memconsole_trainer.weights import tensorfile
from memconsole_trainer.weights.best import best, mark
from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint

SHARD_BYTES = 64 << 20
"""Size of a file of tensors. The host holds one such shard at a time, or one larger tensor."""

Named = tuple[str, NDArray[np.generic]]


class NotFiniteError(ArithmeticError):
    """A tensor holds NaN or infinity and must not be saved. The message names it."""

    cause = "nan"


class FencedError(RuntimeError):
    """A newer attempt owns the run, so nothing was committed."""


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint."""

    path: Path
    size_bytes: int
    seconds: float


class Checkpoints:
    """The `checkpoints/` folder of a run, written by one trainer at a time."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self._last_bytes = 0
        self._last_step: int | None = None
        """The step that was committed last."""

    def sweep(self) -> None:
        """Undo a replacement that was cut short, and remove leftovers of an interrupted save or
        deletion. Call only while holding the run's lock."""
        for old in self._directory.glob(f"{REPLACED}step-*"):
            current = old.with_name(old.name.removeprefix(REPLACED))
            if current.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(current)
        for pattern in (".tmp-*", ".trash-*"):
            for path in self._directory.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def committed(self) -> list[Path]:
        """Committed checkpoints, newest first."""
        with contextlib.suppress(FileNotFoundError):
            found = [p for p in self._directory.iterdir() if CHECKPOINT_NAME.fullmatch(p.name)]
            return sorted(found, key=step_of, reverse=True)
        return []

    def newest(
        self,
        warn: Callable[[str], None],
        heartbeat: Callable[[], None],
        *,
        owned: bool = True,
        verified: Callable[[Path], bool] = lambda path: False,
    ) -> LoadedCheckpoint | None:
        """The newest checkpoint that is intact, or None. One that is `verified` is not hashed.

        One that is damaged or cannot be read is reported through `warn` and skipped. If the caller
        holds the run's lock (`owned`), a damaged one is renamed to ``step-N.BAD``. If not, the run's
        trainer may delete one that is being read: that raises `FileNotFoundError`. `heartbeat` is called
        while hashing.
        """
        for path in self.committed():
            try:
                problem = None if verified(path) else verify(path, heartbeat)
            except OSError as error:
                warn(
                    f"{path.name} cannot be read ({error.strerror}); using the checkpoint before it"
                )
                continue
            if problem is None:
                return LoadedCheckpoint(path, keep_open=not owned)
            if not owned:
                path.stat()
            warn(f"{path.name} is damaged ({problem}); using the checkpoint before it")
            if not owned:
                continue
            with contextlib.suppress(OSError):
                _set_aside(path)
        return None

    def save(
        self,
        step: int,
        tensors: Iterable[Named],
        state: dict[str, Any],
        is_newest: Callable[[], bool],
        written: Callable[[int], None],
        expected_bytes: int = 0,
    ) -> Saved:
        """Commit a checkpoint of `step`. `written` is called with the number of bytes on disk so
        far.

        Raises `NotFiniteError`, `FencedError`, and OSError; ENOSPC before anything is written if less is free
        than the last checkpoint took, or `expected_bytes` before the first one. If the disk is full, the error
        says how much is free and how much a checkpoint takes. Older checkpoints are not touched.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._last_bytes:
            self._check_room(self._last_bytes)
        counted, free = _CountedBytes(tensors), shutil.disk_usage(self._directory).free
        try:
            if not self._last_bytes:
                self._check_room(expected_bytes)
            return self._commit(step, counted, state, is_newest, written)
        except OSError as error:
            if error.errno in FULL:
                for _ in counted:  # the size of a checkpoint is known once all its tensors are
                    pass
                self._last_bytes = counted.size_bytes
                if free < self._last_bytes:
                    raise self._full_disk_error(free, self._last_bytes) from error
            raise

    def _commit(
        self,
        step: int,
        tensors: Iterable[Named],
        state: dict[str, Any],
        is_newest: Callable[[], bool],
        written: Callable[[int], None],
    ) -> Saved:
        """Write a checkpoint of `step`, and commit it."""
        started = time.monotonic()
        temporary = self._directory / f".tmp-{step}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        try:
            files: dict[str, dict[str, Any]] = {}
            total = 0
            for name, shard in _shards(tensors):
                size, digest = tensorfile.write(temporary / name, shard)
                files[name] = {"size": size, "sha256": digest}
                total += size
                written(total)
            files[STATE] = _write_json(temporary / STATE, state)
            parent = next((p.name for p in self.committed()), None)
            manifest = {"format": FORMAT, "step": step, "parent": parent, "files": files}
            total += files[STATE]["size"] + _write_json(temporary / MANIFEST, manifest)["size"]
            sync_directory(temporary)
            written(total)
            if not is_newest():
                raise FencedError("a newer attempt owns this run")
            final = self.path_of(step)
            replaced = self._rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_directory(self._directory)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._last_bytes, self._last_step = total, step
        return Saved(final, total, time.monotonic() - started)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is committed."""
        return self._directory / f"step-{step:09d}"

    def retain(self) -> None:
        """Delete all checkpoints except the newest `keep` and the best one.

        Those of later steps than the one that was just committed could not be read when the run was resumed, and it went
        on from an earlier one. They get the name of damaged ones, so that no reader takes them for its state.
        """
        for path in self.committed():
            if self._last_step is not None and step_of(path) > self._last_step:
                with contextlib.suppress(OSError):
                    _set_aside(path)
        committed = self.committed()
        kept = set(committed[: self._keep])
        best_one = self.best()
        if best_one is not None:
            kept.add(best_one)
            mark(best_one)
        for path in committed:
            if path not in kept:
                with contextlib.suppress(OSError):
                    self._discard(path)

    def _rename(self, temporary: Path, final: Path) -> Path | None:
        """Commit by rename. Returns the path of the checkpoint of the same step that this one replaces.

        Until the new checkpoint is in place, the replaced one has a name under which `sweep` finds it.
        """
        if not final.exists():
            temporary.rename(final)
            return None
        old = final.with_name(REPLACED + final.name)
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        try:
            temporary.rename(final)
        except BaseException:
            old.rename(final)
            raise
        return old

    def best(self) -> Path | None:
        """The best checkpoint; see `best.best`."""
        return best(self.committed())

    def _discard(self, path: Path) -> None:
        """Rename, then delete, so that a half-deleted checkpoint is never taken for a valid one."""
        trash = path.with_name(f".trash-{path.name}-{os.getpid()}-{time.monotonic_ns()}")
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _check_room(self, expected: int) -> None:
        """Raise ENOSPC if less than `expected` bytes are free."""
        free = shutil.disk_usage(self._directory).free
        if free < expected:
            raise self._full_disk_error(free, expected)

    def _full_disk_error(self, free: int, needed: int) -> OSError:
        words = f"{format_bytes(free)} free, a checkpoint needs {format_bytes(needed)}"
        return OSError(errno.ENOSPC, words, str(self._directory))


def _set_aside(path: Path) -> None:
    """Give a checkpoint the name of a damaged one. Raises `OSError`."""
    bad = path.with_name(path.name + DAMAGED)
    shutil.rmtree(bad, ignore_errors=True)
    path.rename(bad)


class _CountedBytes(Iterator[Named]):
    """Tensors, and the bytes of those that were read so far."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        self._tensors = iter(tensors)
        self.size_bytes = 0

    def __next__(self) -> Named:
        name, array = next(self._tensors)
        self.size_bytes += array.nbytes
        return name, array


def _shards(tensors: Iterable[Named]) -> Iterator[tuple[str, list[Named]]]:
    """Group tensors into files of about `SHARD_BYTES`, each of one kind: the first word of the
    tensor's name."""
    counts: dict[str, int] = {}
    unwritten: dict[str, list[Named]] = {}
    for name, array in tensors:
        _check_finite(name, array)
        kind = name.partition(".")[0]
        waiting = unwritten.setdefault(kind, [])
        waiting.append((name, array))
        if sum(a.nbytes for _, a in waiting) >= SHARD_BYTES:
            counts[kind] = counts.get(kind, 0) + 1
            del waiting
            yield f"{kind}-{counts[kind]:05d}.safetensors", unwritten.pop(kind)
    for kind, waiting in unwritten.items():
        yield f"{kind}-{counts.get(kind, 0) + 1:05d}.safetensors", waiting


def _check_finite(name: str, array: NDArray[np.generic]) -> None:
    if array.dtype.kind not in "fV":
        return
    flat = array.reshape(-1)
    for start in range(0, flat.size, 1 << 20):
        if not np.isfinite(flat[start : start + (1 << 20)]).all():
            raise NotFiniteError(f"{name} holds values that are not finite")


def _write_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(value, indent=1, allow_nan=False).encode()
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
