"""Keeps tracer answers on disk; they are valid until the code or the frameworks change.

Each file holds one answer or one timeline. The file name is a hash of its key; the folder name is a hash of the
code and versions it depends on. Files can be deleted at any time; damaged ones are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from memconsole import regular_file, typed_json
from memconsole.memory.exact.timeline import AffineTimeline, Exact
from memconsole.private_files import keep

MOST_BYTES = 64 << 20
"""When the store grows beyond this, the least recently used files are deleted until three quarters of it remain."""
FILE_BYTES = 4 << 20
_SWEEP_EVERY = 64
"""Number of writes between two checks of the store's size."""
_DISTRIBUTIONS = (
    "torch", "transformers", "jax", "jaxlib", "flax", "optax", "numpy", "libtpu", "libtpu-nightly",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
    "jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-rocm60-plugin", "jax-rocm60-pjrt",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas",
)  # fmt: skip
"""Packages whose versions change how much memory a step needs."""
_SHARED = ("memconsole_trainer",)


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one file."""

    key: str
    exact: Exact | None = None
    timeline: AffineTimeline | None = None


def fingerprint(module: str) -> str:
    """A hash of the source of the tracer's package, the trainer and memconsole, and of the frameworks' versions."""
    found = hashlib.sha256()
    found.update(f"{sys.version_info[:2]} {platform.system()} {platform.machine()}\n".encode())
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.update(f"{name} {metadata.version(name)}\n".encode())
    ours = Path(__file__).resolve().parents[2]
    folders = [ours / "memory", ours / "plan"]
    for package in (module.partition(".")[0], *_SHARED):
        folders += _folders(package)
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".json") and file.is_file():
                with contextlib.suppress(OSError):
                    found.update(file.relative_to(folder).as_posix().encode() + b"\0")
                    found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:20]


def _folders(package: str) -> list[Path]:
    """The folders of a top-level package, found without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(place) for place in spec.submodule_search_locations]
    return []


class ExactStore:
    """The files of one fingerprint under `root`. No method raises `OSError`, because a cache may fail."""

    def __init__(self, root: Path, fingerprint: str, most_bytes: int = MOST_BYTES) -> None:
        self._root = root
        self._folder = root / fingerprint
        self._most_bytes = most_bytes
        self._writes = 0

    def read(self, key: str) -> StoredAnswer | None:
        """The answer stored under `key`; None if there is none or the file is damaged."""
        path = self._path(key)
        try:
            stored = typed_json.decode(regular_file.read(path, FILE_BYTES), StoredAnswer)
            if stored.key != key:
                return None
            os.utime(path)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return stored

    def write(self, stored: StoredAnswer) -> None:
        """Store an answer under its key, atomically."""
        content = msgspec.json.encode(stored)
        if len(content) > FILE_BYTES:
            return
        try:
            keep(self._path(stored.key), content)
        except OSError:
            return
        self._writes += 1
        if self._writes % _SWEEP_EVERY == 1:
            self.sweep()

    def sweep(self) -> None:
        """If the store is too large, delete the least recently used files of all fingerprints."""
        files = []
        for path in self._root.glob("*/*"):
            with contextlib.suppress(OSError):
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._most_bytes:
            return
        for _, size, path in sorted(files, key=lambda file: file[0]):
            if total <= 3 * self._most_bytes // 4:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        for folder in self._root.glob("*"):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _path(self, key: str) -> Path:
        return self._folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".json")
