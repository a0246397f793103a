"""A chart as a pure function: curves in, lines of text out.

Each character cell holds several dots (braille 2x4, blocks 2x2, ASCII 1x2). The curve connects
neighbouring points; the first and the last point are drawn exactly. Axes are chosen so that a
growing curve rarely moves them: then a new point changes one or two cells.

Braille bits follow the Unicode block U+2800: left column 1 2 4 64, right column 8 16 32 128.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from memconsole.tui.draw.axes import LABEL_CELLS, Axes, x_axis_end, y_axis, y_labels
from memconsole.tui.draw.lines import Line, Span, fit, left, right

GLYPHS = ("braille", "block", "ascii")
_DOTS = {"braille": (2, 4), "block": (2, 2), "ascii": (1, 2)}
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLOCKS = " ▘▖▌▝▀▞▛▗▚▄▙▐▜▟█"
_ASCII = " '.:"


@dataclass(frozen=True)
class Series:
    """Points `(x, y)` with x ascending; points that are not finite are left out."""

    points: tuple[tuple[float, float], ...]
    role: str = "train"
    marker: str = ""
    """Empty draws a line; a character marks each point instead."""


def finite(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


@dataclass
class _Canvas:
    """Dots and markers of `width` x `height` cells."""

    width: int
    height: int
    glyphs: str
    dots: dict[tuple[int, int], int] = field(default_factory=dict)
    roles: dict[tuple[int, int], str] = field(default_factory=dict)
    marks: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        across, down = _DOTS[self.glyphs]
        return self.width * across, self.height * down

    def dot(self, x: int, y: int, role: str) -> None:
        across, down = _DOTS[self.glyphs]
        columns, rows = self.size
        if not (0 <= x < columns and 0 <= y < rows):
            return
        cell = (x // across, y // down)
        if self.glyphs == "braille":
            bit = _BRAILLE[x % 2][y % 4]
        elif self.glyphs == "block":
            bit = (1, 2, 4, 8)[(x % 2) * 2 + y % 2]
        else:
            bit = 1 << (y % 2)
        self.dots[cell] = self.dots.get(cell, 0) | bit
        self.roles[cell] = role

    def character(self, cell: tuple[int, int]) -> tuple[str, str]:
        if cell in self.marks:
            return self.marks[cell]
        mask = self.dots.get(cell, 0)
        if not mask:
            return " ", ""
        if self.glyphs == "braille":
            return chr(0x2800 + mask), self.roles[cell]
        return (_BLOCKS if self.glyphs == "block" else _ASCII)[mask], self.roles[cell]

    def row(self, y: int) -> Line:
        line: Line = []
        for x in range(self.width):
            character, role = self.character((x, y))
            if line and line[-1].role == role:
                line[-1] = Span(line[-1].text + character, role)
            else:
                line.append(Span(character, role))
        return line


def _dot_of(axes: Axes, canvas: _Canvas, point: tuple[float, float]) -> tuple[int, int]:
    columns, rows = canvas.size
    x = round(axes.across(point[0]) * (columns - 1))
    y = round((1.0 - axes.up(point[1])) * (rows - 1))
    return x, y


def _draw_series(series: Series, axes: Axes, canvas: _Canvas) -> None:
    points = [p for p in finite(series.points) if axes.x_low <= p[0] <= axes.x_high]
    if axes.logarithmic:
        points = [p for p in points if p[1] > 0]
    across, down = _DOTS[canvas.glyphs]
    if series.marker:
        for point in points:
            x, y = _dot_of(axes, canvas, point)
            canvas.marks[(x // across, y // down)] = (series.marker, series.role)
        return
    previous: tuple[int, int] | None = None
    for point in points:
        x, y = _dot_of(axes, canvas, point)
        if previous is None:
            canvas.dot(x, y, series.role)
        else:
            _draw_segment(previous, (x, y), series.role, canvas)
        previous = (x, y)


def _draw_segment(a: tuple[int, int], b: tuple[int, int], role: str, canvas: _Canvas) -> None:
    """A straight line of dots, both ends included."""
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1]))
    for n in range(steps + 1):
        share = n / steps if steps else 0.0
        canvas.dot(round(a[0] + (b[0] - a[0]) * share), round(a[1] + (b[1] - a[1]) * share), role)


def _draw_baseline(y_value: float, axes: Axes, canvas: _Canvas) -> None:
    """A dotted line at `y_value`, beneath everything else."""
    if axes.logarithmic and y_value <= 0:
        return
    y = _dot_of(axes, canvas, (axes.x_low, y_value))[1] // _DOTS[canvas.glyphs][1]
    pattern = ". " if canvas.glyphs == "ascii" else "┄ "
    for x in range(canvas.width):
        if (x, y) not in canvas.dots and (x, y) not in canvas.marks:
            canvas.marks[(x, y)] = pattern[x % 2], "baseline"


def choose_axes(
    series: tuple[Series, ...],
    *,
    total: float | None,
    logarithmic: bool,
    recent: bool = False,
    previous: Axes | None = None,
) -> Axes:
    """The axes for these curves; keeps the y range of `previous` if possible."""
    points = [p for s in series for p in finite(s.points)]
    if not points:
        return Axes(0.0, x_axis_end(0.0, total), *y_axis([], None, logarithmic), logarithmic)
    first, last = min(p[0] for p in points), max(p[0] for p in points)
    if recent:
        line = finite(series[0].points) if series else []
        first, last = (line[0][0], line[-1][0]) if line else (first, last)
        x_low, x_high = first, last if last > first else first + 1
    else:
        x_low, x_high = 0.0, x_axis_end(last, total)
    seen = [p[1] for p in points if x_low <= p[0] <= x_high]
    same = previous if previous and (previous.x_low > 0) == recent else None
    low, high = y_axis(seen, same, logarithmic)
    return Axes(x_low, x_high, low, high, logarithmic)


def plot(
    series: tuple[Series, ...],
    axes: Axes,
    width: int,
    height: int,
    *,
    glyphs: str = "braille",
    marks: tuple[float, ...] = (),
    baseline: float | None = None,
) -> list[Line]:
    """The chart in exactly `height` rows of at most `width` cells.

    `marks` are x positions shown on the x axis (epoch ends). `baseline` is a y value drawn as a
    dotted line.
    """
    if width <= 0 or height <= 0:
        return []
    margin = LABEL_CELLS if width >= 24 else 0
    body_width, body_height = (
        width - margin - (1 if margin else 0),
        height - (1 if height > 2 else 0),
    )
    canvas = _Canvas(max(1, body_width), max(1, body_height), glyphs)
    for curve in series:
        _draw_series(curve, axes, canvas)
    if baseline is not None and math.isfinite(baseline) and axes.holds(baseline, baseline):
        _draw_baseline(baseline, axes, canvas)
    labels = y_labels(axes, body_height) if margin else {}
    lines: list[Line] = []
    for y in range(body_height):
        gutter: Line = []
        if margin:
            label = labels.get(y, "")
            gutter = [Span(right(label, margin) + ("┤" if label else "│"), "dim")]
        lines.append(gutter + canvas.row(y))
    if height > body_height:
        lines.append([Span(_x_axis(axes, margin, width, marks), "dim")])
    return lines


def _x_axis(axes: Axes, margin: int, width: int, marks: tuple[float, ...]) -> str:
    start = f"{axes.x_low:,.0f}"
    end = f"{axes.x_high:,.0f} step"
    body = width - margin - (1 if margin else 0)
    if body < len(start) + len(end) + 2:
        return fit(" " * (width - body) + end, width)
    row = list("─" * body)
    for mark in marks:
        if math.isfinite(mark) and axes.x_low < mark < axes.x_high:
            row[round(axes.across(mark) * (body - 1))] = "┴"
    row[: len(start) + 1] = f"{start} "
    row[body - len(end) - 1 :] = f" {end}"
    return left(" " * margin + ("└" if margin else "") + "".join(row), width)
