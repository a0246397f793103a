"""Reads JSON lines that the table reader refuses: names the bad line, or repairs the text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memconsole.plan.plan import printable
from memconsole.regular_file import open_regular
from memconsole_trainer.data.sources.documents import DataError

LINE_BYTES = 64 << 20
"""A longer line is refused, so that a file without line breaks is not read whole."""
_SURROGATE = re.compile("[\ud800-\udfff]")

Stamp = tuple[str, int, int]
"""Path, size and time of change of a file, by which a prepared table is found again."""


def stamps(files: Sequence[Path]) -> tuple[Stamp, ...]:
    """The current state of `files`."""
    states = [(path, path.stat()) for path in files]
    return tuple((str(path), state.st_size, state.st_mtime_ns) for path, state in states)


def rows(
    files: tuple[Stamp, ...], columns: Collection[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Every row in order, with U+FFFD for what is not text; only the fields in `columns`, if given. Raises
    `DataError`, which names file, line and reason."""
    for name, _, _ in files:
        with open_regular(Path(name)) as raw:
            for number, line in enumerate(_lines(raw, name), 1):
                if not line.strip():
                    continue
                row = parsed(line, f"{printable(name)}: line {number:,}")
                if columns is not None:
                    row = {column: row.get(column) for column in columns}
                yield row


def _lines(raw: Any, name: str) -> Iterator[bytes]:
    rest = b""
    while block := raw.read(1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
        if len(rest) > LINE_BYTES:
            raise DataError(f"{printable(name)}: a line is longer than {LINE_BYTES >> 20} MiB")
    yield rest


def parsed(line: bytes, where: str) -> dict[str, Any]:
    """The object of one line, with U+FFFD for what is not text. Raises `DataError`."""
    try:
        text = line.decode("utf-8", "replace").removeprefix("\ufeff")
        row = json.loads(text, parse_constant=refused)
        if "\\u" in text:  # only an escape can write a lone surrogate
            row = _repaired(row)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, column {error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: not JSON: nested too deeply") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds no object with fields")
    return row


def refused(word: str) -> NoReturn:
    """Raise `ValueError` for a word such as NaN, which Python's reader would take."""
    raise ValueError(f"{word} is no JSON value")


def _repaired(value: Any) -> Any:
    """`value` with every lone surrogate replaced. Two that make a pair are one character already."""
    if isinstance(value, str):
        return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_repaired(key): _repaired(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_repaired(inner) for inner in value]
    return value
