"""From ``data.source`` to a dataset entry: catalog names, hub ids and local files or folders."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from memconsole.plan.catalog.entries import DatasetEntry, DatasetFormat
from memconsole.plan.catalog.folders import (
    PACKED,
    ROWS,
    TABLES,
    known_folder,
    plain_suffix,
    source_error,
)
from memconsole.plan.catalog.ratings import ratings_in
from memconsole.plan.machine import stdlib
from memconsole.plan.plan import DataChoice, PlanError, nearest

# fmt: off
BINARY = frozenset((
    ".7z", ".arrow", ".bin", ".bz2", ".ckpt", ".db", ".docx", ".feather", ".gguf", ".gif", ".gz",
    ".jpeg", ".jpg", ".mp3", ".mp4", ".npy", ".npz", ".onnx", ".orc", ".pdf", ".pickle", ".pkl",
    ".png", ".pt", ".pth", ".rar", ".safetensors", ".sqlite", ".tar", ".tgz", ".wav", ".xlsx",
    ".xz", ".zip", ".zst",
))
# fmt: on
"""Suffixes that are never text. They are refused before a run starts."""
BYTES_PER_TOKEN: dict[DatasetFormat, float] = {
    "text": 3.6,
    "jsonl": 3.6,
    "json": 3.6,
    "csv": 3.6,
    "parquet": 1.8,
    "arrow": 3.6,
    "directory": 3.6,
}
"""Assumed file bytes per token before the data is read: between code and English text with a small BPE.
Parquet is usually compressed about twofold. HDF5 rows are not text and have no guess."""
PIECE_BYTES = 64 * 1024
"""The trainer cuts text files into documents of about this size, so that even one long file can be split into train
and held-out parts. The last one may be twice as long."""
HUB_PREFIX = "hf://"
_HUB_ID = re.compile(r"(?:datasets/)?(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?", re.ASCII)
"""No part may begin with a dot, because the hub's reader takes `..` for a folder."""


def resolve(data: DataChoice, catalog: Mapping[str, DatasetEntry]) -> DatasetEntry:
    """The entry of a `data.source`: a catalog name, ``hf://owner/name[/config]``, or a path. Raises `PlanError`.

    A path costs a few calls of stat, or a walk over at most `folders.MOST_FILES` entries, cached until the folder changes. A
    folder of MovieLens stands for its file of ratings.
    """
    source = data.source
    known = catalog.get(source)
    if known is not None and known.kind == "made":
        return _made(known)
    if known is not None:
        return _standard_library(known) if known.kind == "stdlib" else known
    if source.startswith(HUB_PREFIX):
        return _hub(source, catalog)
    return _local(source, catalog, data)


@lru_cache(maxsize=4)
def _standard_library(entry: DatasetEntry) -> DatasetEntry:
    where = stdlib.directory()
    sizes = stdlib.sizes()
    if not sizes:
        raise source_error(entry.name, f"no source files in {where}")
    return msgspec.structs.replace(
        entry, where=str(where), documents=len(sizes), bytes=sum(sizes), file_bytes=sizes
    )


def _made(entry: DatasetEntry) -> DatasetEntry:
    """The entry of a file in the current folder, if it has been made. Otherwise the plan can be priced only."""
    path = Path(entry.where)
    if not path.is_file():
        return entry
    found = _local(str(path.absolute()), {})
    return msgspec.structs.replace(
        found, name=entry.name, label=entry.label, bytes_per_token=entry.bytes_per_token
    )


def not_made(entry: DatasetEntry) -> PlanError:
    """The error for a file that has not been made."""
    return source_error(
        entry.name,
        f"{entry.where} is not in this folder; {entry.made_by} writes it",
    )


def _hub(source: str, catalog: Mapping[str, DatasetEntry]) -> DatasetEntry:
    match = _HUB_ID.fullmatch(source.removeprefix(HUB_PREFIX))
    if match is None:
        raise source_error(source, "expected hf://owner/name or hf://owner/name/configuration")
    where, config = match.groups()
    for entry in catalog.values():
        if entry.kind == "hub" and entry.where == where and entry.config == config:
            return msgspec.structs.replace(entry, name=source)
    return DatasetEntry(name=source, kind="hub", where=where, config=config, label=where)


def _local(
    source: str, catalog: Mapping[str, DatasetEntry], data: DataChoice | None = None
) -> DatasetEntry:
    try:
        path = Path(source).expanduser().absolute()
        status = path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        raise _missing(source, catalog, error) from None
    if not source:
        raise _missing(source, catalog, FileNotFoundError())
    ratings = ratings_in(path, data)
    if ratings is not None:
        return msgspec.structs.replace(_local(str(ratings), {}), name=source, label=path.name)
    if stat.S_ISDIR(status.st_mode):
        found = known_folder(path)
        if found is None:
            return _file(source, path, "directory", None, None)
        entry = _file(source, path, "directory", found.bytes, len(found.files))
        entry = msgspec.structs.replace(
            entry,
            bytes_per_token=BYTES_PER_TOKEN[found.format],
            file_bytes=found.sizes if found.format == "text" else (),
        )
        return _packed(entry, PACKED.get(found.files[0].suffix.lower(), 1.0))
    if not stat.S_ISREG(status.st_mode):
        raise source_error(source, "neither a file nor a folder")
    suffix = plain_suffix(path.name)
    if suffix in BINARY:
        raise source_error(
            source,
            f"{suffix} is not text; expected a text file or {' '.join({**TABLES, **ROWS})}; tables may be "
            f"compressed ({' '.join(PACKED)})",
        )
    form = TABLES.get(suffix) or ROWS.get(suffix) or "text"
    if status.st_size == 0:
        raise source_error(source, "the file is empty")
    file = _file(source, path, form, status.st_size, None)
    if form == "text":
        file = msgspec.structs.replace(file, file_bytes=(status.st_size,))
    return _packed(file, PACKED.get(path.suffix.lower(), 1.0))


def _packed(entry: DatasetEntry, ratio: float) -> DatasetEntry:
    """The entry of compressed files, whose text is about `ratio` times as large as the files."""
    if ratio == 1.0 or not entry.bytes_per_token:
        return entry
    return msgspec.structs.replace(entry, bytes_per_token=entry.bytes_per_token / ratio)


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


def _missing(source: str, catalog: Mapping[str, DatasetEntry], error: Exception) -> PlanError:
    if isinstance(error, PermissionError):
        return source_error(source, "cannot be read: permission denied")
    if _HUB_ID.fullmatch(source) and not Path(source).suffix:
        hint = f' — a hub dataset is written "{HUB_PREFIX}{source}"'
    elif os.sep in source:
        name = Path(source)
        hint = "" if name.suffix else nearest(name.name, catalog)
        return source_error(source, f"no such file or folder{hint}")
    else:
        hint = nearest(source, catalog)
    return source_error(
        source, f"no such file, and not one of {', '.join(catalog)} or hf://owner/name{hint}"
    )
