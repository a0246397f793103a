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

FORMATS: dict[str, DatasetFormat] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}
"""What a file holds, by its suffix in lower case."""
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
            raise _error(source, f"no {_suffixes()} file in that folder")
        return _file(source, path, "directory", size, files)
    if not stat.S_ISREG(status.st_mode):
        raise _error(source, "neither a file nor a folder")
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        kind = quote(path.suffix) if path.suffix else "a name without suffix"
        raise _error(source, f"{kind} is not a kind of data file; allowed: {_suffixes()}")
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

    `changed` is the folder's modification time: it only keys the cache.
    """
    files = size = seen = 0
    for folder, names, entries in os.walk(path):
        names[:] = [name for name in names if not name.startswith(".")]
        seen += len(names) + len(entries)
        if seen > MOST_FILES:
            return None, None
        for entry in entries:
            if Path(entry).suffix.lower() in FORMATS:
                try:
                    size += Path(folder, entry).stat().st_size
                except OSError:
                    continue
                files += 1
    return files, size


def _missing(source: str, catalog: Mapping[str, DatasetEntry], error: Exception) -> PlanError:
    if isinstance(error, PermissionError):
        return _error(source, "cannot be read: permission denied")
    hint = nearest(source, catalog)
    if not hint and _HUB_ID.fullmatch(source) and not Path(source).suffix:
        hint = f' — a hub dataset is written "{HUB_PREFIX}{source}"'
    return _error(
        source, f"no such file, and not one of {', '.join(catalog)} or hf://owner/name{hint}"
    )


def _suffixes() -> str:
    return " ".join(FORMATS)


def _error(source: str, reason: str) -> PlanError:
    return PlanError(f"data.source = {quote(source)}: {reason}", "data.source")
