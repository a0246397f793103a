"""Draws horizontal bars: one value with a tick, and stacked parts with letters.

Colour is never the only sign: the tick is a character, and each stacked part starts with its
letter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from memconsole.tui.draw.lines import Line, Span

_EIGHTHS = " ▏▎▍▌▋▊▉"
"""A cell of which so many eighths are filled from the left."""
_LEVELS = "▁▂▃▄▅▆▇█"
"""A cell of which one to eight eighths are filled from below."""
FULL, EMPTY, TICK, REACHED = "█", "·", "┃", "▒"


def cells(value: float, scale: float, width: int) -> float:
    """The length of `value` in cells, from 0 to `width`, on a bar that ends at `scale`."""
    if not (math.isfinite(value) and math.isfinite(scale)) or scale <= 0 or width <= 0:
        return 0.0
    return min(max(value / scale, 0.0), 1.0) * width


def bar(
    value: float | None,
    scale: float,
    width: int,
    *,
    tick: float | None = None,
    reached: float | None = None,
    role: str = "train",
) -> Line:
    """A bar of exactly `width` cells. `tick` is marked on the same scale, at most at the end; the
    cells up to `reached`, an earlier maximum, are shaded."""
    if width <= 0:
        return []
    length = cells(value, scale, width) if value is not None else 0.0
    whole = int(length)
    row = [FULL] * whole + [EMPTY] * (width - whole)
    eighth = int((length - whole) * 8)
    if eighth and whole < width:
        row[whole] = _EIGHTHS[eighth]
    filled = whole + bool(eighth and whole < width)
    most = round(cells(reached, scale, width)) if reached is not None else 0
    row[filled:most] = [REACHED] * max(0, most - filled)
    roles = [role if n < max(filled, most) else "dim" for n in range(width)]
    if tick is not None and scale > 0 and math.isfinite(tick) and tick >= 0:
        cell = min(width - 1, int(cells(tick, scale, width)))
        row[cell], roles[cell] = TICK, "tick"
    return _joined(row, roles)


def level(value: float, scale: float) -> str:
    """One cell, as high as the share of `value` in `scale`; the lowest one for less than an eighth."""
    return _LEVELS[max(1, round(cells(value, scale, 1) * 8)) - 1]


def area(
    points: Iterable[tuple[float, float]],
    end: float,
    scale: float,
    width: int,
    rows: int,
    *,
    line: float | None = None,
    most: float | None = None,
) -> list[Line]:
    """Points `(x, value)`, x ascending from 0 to `end`, as a filled area of `rows` x `width` cells.

    The top is `scale`. Each column shows the highest value of its range of x, or the column before
    if it has none. The ranges are fixed, so a growing series changes only its last column. `line` is
    dotted where nothing is drawn, and columns above `most` have another colour.
    """
    highest: dict[int, float] = {}
    for x, value in points:
        if math.isfinite(value) and width > 0:
            column = min(width - 1, int(cells(x, end, width)))
            highest[column] = max(value, highest.get(column, value))
    dotted = None if line is None else rows - 1 - min(rows - 1, int(cells(line, scale, rows)))
    grid = [["┄" if y == dotted else " "] * width for y in range(rows)]
    roles = [["tick" if y == dotted else "dim"] * width for y in range(rows)]
    value = 0.0
    for column in range(min(highest), max(highest) + 1) if highest else ():
        value = highest.get(column, value)
        eighths = max(1, round(cells(value, scale, rows) * 8))
        for y in range(rows):
            filled = min(8, eighths - 8 * (rows - 1 - y))
            if filled > 0:
                grid[y][column] = _LEVELS[filled - 1]
                roles[y][column] = "warn" if most is not None and value > most else "train"
    return [_joined(row, row_roles) for row, row_roles in zip(grid, roles, strict=True)]


def stacked(
    parts: Sequence[tuple[str, float, str]], scale: float, width: int, *, limit: float | None = None
) -> Line:
    """Parts `(letter, value, role)` end to end on a bar of `width` cells that ends at `scale`.

    A part of at least one cell starts with its letter. `limit` is marked like a tick. Cumulative
    ends are rounded, so the whole bar has the length of the sum.
    """
    if width <= 0:
        return []
    row = [EMPTY] * width
    roles = ["dim"] * width
    total = 0.0
    start = 0
    for letter, value, role in parts:
        total += max(0.0, value) if math.isfinite(value) else 0.0
        end = round(cells(total, scale, width))
        for n in range(start, end):
            row[n] = letter if n == start else FULL
            roles[n] = role
        start = max(start, end)
    if total > 0 and start == 0:
        row[0], roles[0] = "▏", parts[0][2] if parts else "dim"
    if limit is not None:
        cell = min(width - 1, int(cells(limit, scale, width)))
        row[cell], roles[cell] = TICK, "tick"
    return _joined(row, roles)


def _joined(row: Sequence[str], roles: Sequence[str]) -> Line:
    """The characters of a row as spans, one for each stretch of the same role."""
    line: Line = []
    for character, role in zip(row, roles, strict=True):
        if line and line[-1].role == role:
            line[-1] = Span(line[-1].text + character, role)
        else:
            line.append(Span(character, role))
    return line
