"""Aligned columns of plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows as lines with two spaces between columns; the columns in `left` are left-aligned."""
    widths = [
        max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(_most(rows))
    ]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _most(rows: Sequence[Sequence[str]]) -> int:
    return max((len(row) for row in rows), default=0)
