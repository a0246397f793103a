"""From ``data.source`` to a dataset entry: catalog names, hub ids and local files or folders."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from memconsole.plan.catalog.entries import DatasetEntry, DatasetFormat
from memconsole.plan.catalog.ratings import ratings_in
from memconsole.plan.machine import stdlib
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
PACKED = {".gz": 3.0, ".bz2": 4.0, ".xz": 4.0, ".zst": 3.0}
"""Compressions of tables, such as rows.jsonl.gz, with an assumed ratio of the text's size to the file's."""
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
"""Suffixes that are never text. They are refused before a run starts."""
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
BYTES_PER_TOKEN: dict[DatasetFormat, float] = {
    "text": 3.6,
    "jsonl": 3.6,
    "json": 3.6,
    "csv": 3.6,
    "parquet": 1.8,
    "directory": 3.6,
}
"""Assumed file bytes per token before the data is read: between code and English text with a small BPE.
Parquet is usually compressed about twofold. HDF5 rows are not text and have no guess."""
_SAME = {".ndjson": ".jsonl", ".hdf5": ".h5"}
_BESIDE = re.compile(
    r"(readme|licen[cs]e|copying|notice|changelog|changes|contributing|citation|authors|security"
    r"|code_of_conduct|requirements|dataset_card|data_card)([-_. ]|$)"
)
"""Files that describe a folder's data, by the beginning of their name."""
_CONFIGURATION = re.compile(
    r"(config|dataset_infos?|metadata|schema|settings|state|manifest|package|package-lock|tsconfig"
    r"|jsconfig|composer|tokenizer|tokenizer_config|special_tokens_map|generation_config)$"
)
"""JSON files that are not tables."""
PIECE_BYTES = 64 * 1024
"""The trainer cuts text files into documents of about this size, so that even one long file can be split into train
and held-out parts. The last one may be twice as long."""
MOST_FILES = 20_000
"""Most entries of a folder that are read for its size. The size of a larger folder is unknown before the run."""
HUB_PREFIX = "hf://"
_HUB_ID = re.compile(r"(?:datasets/)?(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?", re.ASCII)
"""No part may begin with a dot, because the hub's reader takes `..` for a folder."""


def resolve(source: str, catalog: Mapping[str, DatasetEntry]) -> DatasetEntry:
    """The entry of a catalog name, ``hf://owner/name[/config]``, or a path. Raises `PlanError`.

    A path costs a few calls of stat, or a walk over at most `MOST_FILES` entries, cached until the folder changes. A
    folder of MovieLens stands for its file of ratings.
    """
    known = catalog.get(source)
    if known is not None and known.kind == "made":
        return _made(known)
    if known is not None:
        return _standard_library(known) if known.kind == "stdlib" else known
    if source.startswith(HUB_PREFIX):
        return _hub(source, catalog)
    return _local(source, catalog)


@lru_cache(maxsize=4)
def _standard_library(entry: DatasetEntry) -> DatasetEntry:
    where = stdlib.directory()
    sizes = stdlib.sizes()
    if not sizes:
        raise _error(entry.name, f"no source files in {where}")
    return msgspec.structs.replace(
        entry, where=str(where), documents=len(sizes), bytes=sum(sizes), file_bytes=sizes
    )


def _made(entry: DatasetEntry) -> DatasetEntry:
    """The entry of a file in the current folder, if it has been made. Otherwise the plan can be priced only."""
    path = Path(entry.where).absolute()
    if not path.is_file():
        return entry
    found = _local(str(path), {})
    return msgspec.structs.replace(
        found, name=entry.name, label=entry.label, bytes_per_token=entry.bytes_per_token
    )


def not_made(entry: DatasetEntry) -> PlanError:
    """The error for a file that has not been made."""
    return _error(
        entry.name,
        f"{entry.where} is not in this folder; {entry.made_by} writes it",
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
    ratings = ratings_in(path)
    if ratings is not None:
        return msgspec.structs.replace(_local(str(ratings), {}), name=source, label=path.name)
    if stat.S_ISDIR(status.st_mode):
        found = _remembered(path, status.st_mtime_ns)
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
        raise _error(source, "neither a file nor a folder")
    suffix = plain_suffix(path.name)
    if suffix in BINARY:
        raise _error(
            source,
            f"{suffix} is not text; expected a text file or {' '.join({**TABLES, **ROWS})}; tables may be "
            f"compressed ({' '.join(PACKED)})",
        )
    form = TABLES.get(suffix) or ROWS.get(suffix) or "text"
    if status.st_size == 0:
        raise _error(source, "the file is empty")
    file = _file(source, path, form, status.st_size, None)
    return _packed(file, PACKED.get(path.suffix.lower(), 1.0))


def plain_suffix(name: str) -> str:
    """The suffix of a file in lower case; that of a compressed table without its compression: .jsonl of
    rows.jsonl.gz."""
    stem, suffix = os.path.splitext(name.lower())
    inner = os.path.splitext(stem)[1]
    return inner if suffix in PACKED and inner in TABLES and inner != ".parquet" else suffix


def _packed(entry: DatasetEntry, ratio: float) -> DatasetEntry:
    """The entry of files that hold `ratio` times as much text as they are large."""
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


class Folder(NamedTuple):
    """The data files of a folder, all of one format, in a fixed order."""

    format: DatasetFormat
    """text, or the format of the tables."""
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    """Bytes of each file."""

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def folder(path: Path, most: int | None = None) -> Folder | None:
    """The data files of a folder; the size estimate and the trainer both use them. None if the folder has more
    than `most` entries.

    The data are text files, or tables of one kind; next to tables, a README, a licence and configuration are
    ignored. Hidden, empty and unreadable files are skipped. Raises `PlanError` for a mixture, because part of
    it would have to be dropped.
    """
    found: dict[str, list[tuple[Path, int]]] = {}
    seen = 0
    for where, names, entries in os.walk(path):
        names[:] = sorted(n for n in names if n not in SKIPPED_FOLDERS and not n.startswith("."))
        seen += len(names) + len(entries)
        if most is not None and seen > most:
            return None
        for entry in sorted(entries):
            kind = _kind(entry)
            if kind is None or entry.startswith("."):
                continue
            file = Path(where, entry)
            try:
                status = file.stat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size:
                found.setdefault(kind, []).append((file, status.st_size))
    beside, configuration = found.pop("beside", []), found.pop("configuration", [])
    if not found:
        # If the folder has nothing else, these files are the data.
        found = {".json": configuration} if configuration and not beside else {"text": []}
    if len(found) > 1:
        listed = ", ".join(f"{len(files):,} {kind}" for kind, files in sorted(found.items()))
        raise _error(
            str(path),
            f"holds files of several kinds ({listed}): give one file or a folder of one kind",
        )
    kind, files = next(iter(found.items()))
    if kind == "text":
        files = sorted(files + beside)
    if kind in ROWS:
        raise _error(str(path), f"holds {len(files):,} {kind} files: give one of them")
    if not files:
        raise _error(
            str(path), f"holds no text files and no {' '.join(TABLES)} files, plain or compressed"
        )
    form: DatasetFormat = TABLES.get(kind, "text")
    return Folder(form, tuple(file for file, _ in files), tuple(size for _, size in files))


def _kind(name: str) -> str | None:
    """The kind of a file in a folder: "text", "beside" or "configuration" (ignored next to tables), or the suffix of a
    table or row file. None for other files."""
    suffix = plain_suffix(name)
    stem = os.path.splitext(name.lower())[0]
    if suffix in (".yml", ".yaml") or (suffix in (".md", ".txt") and _BESIDE.match(stem)):
        return "beside"
    if suffix == ".json" and _CONFIGURATION.match(stem):
        return "configuration"
    if suffix in TEXT:
        return "text"
    return _SAME.get(suffix, suffix) if suffix in TABLES or suffix in ROWS else None


@lru_cache(maxsize=64)
def _remembered(path: Path, changed: int) -> Folder | None:
    """`folder`, cached by the folder's modification time `changed`."""
    return folder(path, MOST_FILES)


def _missing(source: str, catalog: Mapping[str, DatasetEntry], error: Exception) -> PlanError:
    if isinstance(error, PermissionError):
        return _error(source, "cannot be read: permission denied")
    if _HUB_ID.fullmatch(source) and not Path(source).suffix:
        hint = f' — a hub dataset is written "{HUB_PREFIX}{source}"'
    elif os.sep in source:
        return _error(source, "no such file or folder")
    else:
        hint = nearest(source, catalog)
    return _error(
        source, f"no such file, and not one of {', '.join(catalog)} or hf://owner/name{hint}"
    )


def _error(source: str, reason: str) -> PlanError:
    return PlanError(f"data.source = {quote(source)}: {reason}", "data.source")
