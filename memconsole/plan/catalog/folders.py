"""Which files of a folder are its data, and which are left out."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

from memconsole.once_per_version import once_per_version
from memconsole.plan.catalog.encodings import HEAD_BYTES, is_binary
from memconsole.plan.catalog.entries import DatasetFormat
from memconsole.plan.plan import PlanError, quote
from memconsole.regular_file import open_regular
from memconsole.units import format_bytes

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
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
MOST_FILES = 20_000
"""Most entries of a folder that are read for its size. The size of a larger folder is unknown before the run."""
MOST_HEADS = 2_000
"""Most files of text whose beginning is read for the size of a folder. The trainer reads all of them."""
MOST_LABELS = 4
"""The most kinds of left out files that a message names."""
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
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)([._-]|$)")
"""Files and folders of one split of a dataset, by the beginning of their name."""
_SUFFIX = re.compile(r"\.[a-z0-9]{1,10}")

_SizedFile = tuple[Path, int]
"""A file and its bytes."""


class Folder(NamedTuple):
    """The data files of a folder, all of one format, in a fixed order."""

    format: DatasetFormat
    """text, or the format of the tables; arrow for a table that `datasets` has saved."""
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    """Bytes of each file."""
    left_out: tuple[tuple[str, int], ...] = ()
    """The files that are left out: a kind and how many of that kind, the most frequent first."""
    splits: tuple[str, ...] = ()
    """The splits of a dataset that the files are named after, if there are several."""

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    @property
    def words(self) -> str:
        """``takes 3 .jsonl files (12 MiB), leaves out 2 .txt, 1 .csv``; empty if nothing is left out and the files are
        not of several splits."""
        if not self.left_out and not self.splits:
            return ""
        suffix = plain_suffix(self.files[0].name)
        kind = "text" if self.format == "text" else _SAME.get(suffix, suffix)
        files = f"{len(self.files):,} {kind} file{'s' * (len(self.files) > 1)}"
        named = [f"{count:,} {label}" for label, count in self.left_out[:MOST_LABELS]]
        others = sum(count for _, count in self.left_out[MOST_LABELS:])
        named += [f"{others:,} more"] if others else []
        takes = f"takes {files} ({format_bytes(self.bytes)})"
        takes += f", leaves out {', '.join(named)}" if named else ""
        if not self.splits:
            return takes
        return (
            f"{takes}; reads the splits {', '.join(self.splits)} as one: to hold one out, give a file of each as "
            "data.source and data.validation"
        )


def folder(path: Path, most: int | None = None) -> Folder | None:
    """The data files of a folder; the size estimate and the trainer both use them. None if the folder has more
    than `most` entries.

    The data are text files, or tables of one kind; next to tables, a README, a licence and configuration are
    left out. So are files of other kinds, binary, hidden, empty and unreadable ones, and further names of a file.
    Raises `PlanError` for a mixture of data, and for a folder in it that cannot be read, because part of the data would
    have to be dropped.
    """

    saved = _saved(path)
    if saved is not None:
        return saved
    left_out: Counter[str] = Counter()
    by_kind = _files_by_kind(path, most, left_out)
    if by_kind is None:
        return None
    kind, files = _data_files(path, by_kind, most, left_out)
    form: DatasetFormat = TABLES.get(kind, "text")
    return Folder(
        form,
        tuple(file for file, _ in files),
        tuple(size for _, size in files),
        tuple(sorted(left_out.items(), key=lambda item: (-item[1], item[0]))),
        _splits(path, [file for file, _ in files if form != "text" or file.suffix == ".txt"]),
    )


def _files_by_kind(
    path: Path, most: int | None, left_out: Counter[str]
) -> dict[str, list[_SizedFile]] | None:
    """The files in a folder by `_kind`, each with its bytes, in a fixed order. `left_out` counts the other ones by label.
    None if the folder has more than `most` entries. Raises `PlanError`."""

    def refuse(error: OSError) -> NoReturn:
        place = "" if Path(error.filename) == path else f"{error.filename} "
        raise source_error(str(path), f"{place}cannot be read: {error.strerror}")

    by_kind: dict[str, list[_SizedFile]] = {}
    known: set[tuple[int, int]] = set()
    seen = 0
    for where, names, entries in os.walk(path, onerror=refuse):
        labels = {name: _folder_label(where, name) for name in names}
        left_out.update(label for label in labels.values() if label)
        names[:] = sorted(name for name in names if not labels[name])
        seen += len(names) + len(entries)
        if most is not None and seen > most:
            return None
        for entry in sorted(entries):
            kind = None if entry.startswith(".") else _kind(entry)
            if kind is None:
                left_out[_label(entry)] += 1
                continue
            file = Path(where, entry)
            try:
                status = file.stat()
            except PermissionError as error:  # of its folder
                refuse(error)
            except OSError:
                left_out["unreadable"] += 1
                continue
            if not stat.S_ISREG(status.st_mode):
                left_out["unreadable"] += 1
            elif not status.st_size:
                left_out["empty"] += 1
            elif status.st_ino and (status.st_dev, status.st_ino) in known:  # some systems give 0
                left_out["linked file"] += 1
            else:
                known.add((status.st_dev, status.st_ino))
                by_kind.setdefault(kind, []).append((file, status.st_size))
    return by_kind


def _data_files(
    path: Path, by_kind: dict[str, list[_SizedFile]], most: int | None, left_out: Counter[str]
) -> tuple[str, list[_SizedFile]]:
    """The kind and the files of a folder that are its data. `left_out` also counts those that are not. With `most`, only
    the first texts are looked into. Raises `PlanError`."""
    data = dict(by_kind)
    beside, configuration = data.pop("beside", []), data.pop("configuration", [])
    if not data:
        # If the folder has nothing else, these files are the data.
        if configuration and not beside:
            data, configuration = {".json": configuration}, []
        else:
            data = {"text": []}
    if len(data) > 1:
        listed = ", ".join(f"{len(files):,} {kind}" for kind, files in sorted(data.items()))
        raise source_error(
            str(path),
            f"holds files of several kinds ({listed}): give one file or a folder of one kind",
        )
    kind, files = next(iter(data.items()))
    if kind == "text":
        texts = sorted(files + beside)
        checked = len(texts) if most is None else MOST_HEADS
        binary = {file for file, _ in texts[:checked] if _is_binary(file)}
        left_out.update(["binary"] * len(binary))
        files, beside = [item for item in texts if item[0] not in binary], []
    if kind in ROWS:
        raise source_error(str(path), f"holds {len(files):,} {kind} files: give one of them")
    if not files:
        raise source_error(
            str(path), f"holds no text files and no {' '.join(TABLES)} files, plain or compressed"
        )
    left_out.update(_label(file.name) for file, _ in beside)
    left_out.update(f"{_label(file.name)} of configuration" for file, _ in configuration)
    return kind, files


def _splits(path: Path, files: Iterable[Path]) -> tuple[str, ...]:
    """The splits of a dataset that files in the folder `path` are named after; empty if there is one, or none."""
    names = (part.lower() for file in files for part in file.relative_to(path).parts)
    splits = sorted({match[1] for match in map(_SPLIT.match, names) if match})
    return tuple(splits) if len(splits) > 1 else ()


def _saved(path: Path) -> Folder | None:
    """The table in a folder that `save_to_disk` of `datasets` wrote; None for other folders. Raises `PlanError` for
    one with several splits."""
    if os.path.isfile(path / "dataset_dict.json"):
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        if splits:
            first = min(splits, key=lambda name: (name != "train", not name.startswith("train")))
            raise source_error(
                str(path),
                f"holds the splits {', '.join(splits)}: give one, as {path / first}; data.validation may name another",
            )
    if not os.path.isfile(path / "state.json"):
        return None
    files = sorted(path.glob("data-*.arrow"))
    sizes = tuple(file.stat().st_size for file in files)
    return Folder("arrow", tuple(files), sizes) if files else None


def known_folder(path: Path) -> Folder | None:
    """`folder` of at most `MOST_FILES` entries, cached until its modification time changes."""
    try:
        return _remembered(path)
    except OSError as error:
        raise source_error(str(path), f"cannot be read: {error.strerror}") from None


@once_per_version(64)
def _remembered(path: Path) -> Folder | None:
    return folder(path, MOST_FILES)


def plain_suffix(name: str) -> str:
    """The suffix of a file in lower case; that of a compressed table without its compression: .jsonl of
    rows.jsonl.gz."""
    stem, suffix = os.path.splitext(name.lower())
    inner = os.path.splitext(stem)[1]
    return inner if suffix in PACKED and inner in TABLES and inner != ".parquet" else suffix


def source_error(source: str, reason: str) -> PlanError:
    """The error for a `data.source` that cannot be used."""
    return PlanError(f"data.source = {quote(source)}: {reason}", "data.source")


def _is_binary(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return is_binary(file.read(HEAD_BYTES))
    except OSError:
        return False  # the trainer reports why it cannot be read


def _kind(name: str) -> str | None:
    """The kind of a file in a folder: "text", "beside" or "configuration" (left out next to tables), or the suffix of a
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


def _label(name: str) -> str:
    """How a file that is left out is counted."""
    if name.startswith("."):
        return "hidden"
    suffix = os.path.splitext(name.lower())[1]
    if not suffix:
        return "without suffix"
    return suffix if _SUFFIX.fullmatch(suffix) else "of another kind"


def _folder_label(where: str, name: str) -> str:
    """How a folder that is left out is counted; empty if its files are read."""
    if name.startswith("."):
        return "hidden"
    if name in SKIPPED_FOLDERS:
        return f"{name}/"
    return "linked folder" if os.path.islink(os.path.join(where, name)) else ""
