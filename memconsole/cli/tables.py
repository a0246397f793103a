"""Aligned columns of plain text."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

_LEAST_TEXT = 24
"""Characters that the last column needs beside the others; if there are fewer, its text goes below them."""
_INDENT = "    "


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows as lines with two spaces between columns; the columns in `left` are left-aligned. In a terminal, a
    left-aligned last column is wrapped."""
    last = _most(rows) - 1
    widths = [
        max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(last + 1)
    ]
    width = terminal_width() if last in left else None
    lines = []
    for row in rows:
        cells = [
            cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ]
        line = "  ".join(cells).rstrip()
        if width is None or len(line) <= width or len(row) <= last:
            lines.append(line)
        else:
            lines += _wrapped("  ".join(cells[:last]), row[last], width)
    return lines


def _wrapped(start: str, text: str, width: int) -> list[str]:
    """`start` and the lines of `text`: beside it if there is room, else below it."""
    room = width - len(start) - 2
    if room >= _LEAST_TEXT:
        first, *others = textwrap.wrap(text, room)
        return [f"{start}  {first}", *(" " * (len(start) + 2) + line for line in others)]
    return [
        start.rstrip(),
        *textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT),
    ]


def in_blocks(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as `columns` prints them. In a terminal that is too narrow, the columns after the first one are distributed
    over several blocks."""
    whole = columns(rows)
    width = terminal_width() or sys.maxsize
    others = _most(rows) - 1
    for count in range(1, others + 1):
        size = math.ceil(others / count)
        starts = range(1, others + 1, size)
        blocks = [columns([[row[0], *row[i : i + size]] for row in rows]) for i in starts]
        if all(len(line) <= width for block in blocks for line in block):
            return [line for block in blocks for line in ("", *block)][1:]
    return whole


def _most(rows: Sequence[Sequence[str]]) -> int:
    return max((len(row) for row in rows), default=0)
