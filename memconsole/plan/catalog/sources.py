"""From ``data.source`` to a dataset entry: catalog names, hub ids and local files or folders."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from memconsole.plan import stdlib
from memconsole.plan.catalog.entries import DatasetEntry, DatasetFormat
from memconsole.plan.plan import PlanError, nearest, quote

TABLES: dict[str, DatasetFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
"""Tables with a text column, by suffix in lower case."""
ROWS: dict[str, DatasetFormat] = {".h5": "hdf5", ".hdf5": "hdf5"}
# fmt: off
TEXT = frozenset((
    ".txt", ".text", ".md", ".rst", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs",
    ".java", ".js", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".kt", ".scala", ".sh",
    ".sql", ".html", ".css", ".tex", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".org", ".log",
))
# fmt: on
"""What counts as text inside a folder; a single text file may have any other name."""
# fmt: off
BINARY = frozenset((
    ".7z", ".arrow", ".bin", ".bz2", ".ckpt", ".db", ".docx", ".feather", ".gguf", ".gif", ".gz",
    ".jpeg", ".jpg", ".mp3", ".mp4", ".npy", ".npz", ".onnx", ".orc", ".pdf", ".pickle", ".pkl",
    ".png", ".pt", ".pth", ".rar", ".safetensors", ".sqlite", ".tar", ".tgz", ".wav", ".xlsx",
    ".xz", ".zip", ".zst",
))
# fmt: on
"""Suffixes that are surely not text: refused before a run instead of in it."""
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
BYTES_PER_TOKEN: dict[DatasetFormat, float] = {
    "text": 3.6,
    "jsonl": 3.6,
    "json": 3.6,
    "csv": 3.6,
    "parquet": 1.8,
    "directory": 3.6,
}
"""File bytes per token before the data is read: between code and English text with a small BPE;
parquet is usually compressed about twofold. HDF5 rows are not text: no guess."""
MOST_FILES = 20_000
"""Entries of a folder looked at for its size; a larger one's size is not known before the run."""
HUB_PREFIX = "hf://"
_HUB_ID = re.compile(r"(?:datasets/)?([\w.-]+/[\w.-]+)(?:/([\w.-]+))?", re.ASCII)


def resolve(source: str, catalog: Mapping[str, DatasetEntry]) -> DatasetEntry:
    """The entry of a catalog name, ``hf://owner/name[/config]``, or a path. Raises `PlanError`.

    A path costs one stat, or a walk over at most `MOST_FILES` entries, remembered until it changes.
    """
    known = catalog.get(source)
    if known is not None:
        return _standard_library(known) if known.kind == "stdlib" else known
    if source.startswith(HUB_PREFIX):
        return _hub(source, catalog)
    return _local(source, catalog)


@lru_cache(maxsize=4)
def _standard_library(entry: DatasetEntry) -> DatasetEntry:
    where = stdlib.directory()
    files = stdlib.files()
    if not files:
        raise _error(entry.name, f"no source files in {where}")
    return msgspec.structs.replace(
        entry, where=str(where), documents=len(files), bytes=stdlib.total_bytes()
    )


def _hub(source: str, catalog: Mapping[str, DatasetEntry]) -> DatasetEntry:
    match = _HUB_ID.fullmatch(source.removeprefix(HUB_PREFIX))
    if match is None:
        raise _error(source, "expected hf://owner/name or hf://owner/name/configuration")
    where, config = match.groups()
    for entry in catalog.values():
        if entry.kind == "hub" and entry.where == where and entry.config == config:
            return msgspec.structs.replace(entry, name=source)
    return DatasetEntry(name=source, kind="hub", where=where, config=config, label=where)


def _local(source: str, catalog: Mapping[str, DatasetEntry]) -> DatasetEntry:
    try:
        path = Path(source).expanduser().absolute()
        status = path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise _missing(source, catalog, error) from None
    if not source:
        raise _missing(source, catalog, FileNotFoundError())
    if stat.S_ISDIR(status.st_mode):
        files, size = _folder(path, status.st_mtime_ns)
        if files == 0:
            raise _error(source, f"holds no text files and no {' '.join(TABLES)} files")
        return _file(source, path, "directory", size, files)
    if not stat.S_ISREG(status.st_mode):
        raise _error(source, "neither a file nor a folder")
    suffix = path.suffix.lower()
    if suffix in BINARY:
        raise _error(
            source, f"{suffix} is not text; expected a text file or {' '.join({**TABLES, **ROWS})}"
        )
    form = TABLES.get(suffix) or ROWS.get(suffix) or "text"
    if status.st_size == 0:
        raise _error(source, "the file is empty")
    return _file(source, path, form, status.st_size, None)


def _file(
    source: str, path: Path, form: DatasetFormat, size: int | None, documents: int | None
) -> DatasetEntry:
    return DatasetEntry(
        name=source,
        label=path.name,
        kind="file",
        where=str(path),
        format=form,
        documents=documents,
        bytes=size,
        bytes_per_token=BYTES_PER_TOKEN.get(form),
    )


@lru_cache(maxsize=64)
def _folder(path: Path, changed: int) -> tuple[int | None, int | None]:
    """Data files below `path` and their bytes; (None, None) where there are too many to look at.

    Text files where there are any, else the tables, as the trainer reads a folder. `changed` is the
    folder's modification time: it only keys the cache.
    """
    texts: list[int] = []
    tables: list[int] = []
    seen = 0
    for folder, names, entries in os.walk(path):
        names[:] = [n for n in names if n not in SKIPPED_FOLDERS and not n.startswith(".")]
        seen += len(names) + len(entries)
        if seen > MOST_FILES:
            return None, None
        for entry in entries:
            suffix = Path(entry).suffix.lower()
            if not entry.startswith(".") and (suffix in TEXT or suffix in TABLES):
                try:
                    size = Path(folder, entry).stat().st_size
                except OSError:
                    continue
                if size:
                    (texts if suffix in TEXT else tables).append(size)
    sizes = texts or tables
    return len(sizes), sum(sizes)


def _missing(source: str, catalog: Mapping[str, DatasetEntry], error: Exception) -> PlanError:
    if isinstance(error, PermissionError):
        return _error(source, "cannot be read: permission denied")
    if _HUB_ID.fullmatch(source) and not Path(source).suffix:
        hint = f' — a hub dataset is written "{HUB_PREFIX}{source}"'
    else:
        hint = nearest(source, catalog)
    return _error(
        source, f"no such file, and not one of {', '.join(catalog)} or hf://owner/name{hint}"
    )


def _error(source: str, reason: str) -> PlanError:
    return PlanError(f"data.source = {quote(source)}: {reason}", "data.source")
