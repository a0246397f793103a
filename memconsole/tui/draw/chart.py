"""The loss chart as a pure function: curves in, lines of text out.

Each character cell holds several dots (braille 2x4, blocks 2x2, ASCII 1x2). The curve connects
neighbouring points; the first and the last point are drawn exactly. Axes are chosen so that a
growing curve rarely moves them: then a new point changes one or two cells.

Braille bits follow the Unicode block U+2800: left column 1 2 4 64, right column 8 16 32 128.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from memconsole.tui.draw.ink import Line, Span, fit, left, right

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


@dataclass(frozen=True)
class Axes:
    """The range the chart shows: x from `x_low` to `x_high`, y from `y_low` to `y_high`."""

    x_low: float = 0.0
    x_high: float = 1.0
    y_low: float = 0.0
    y_high: float = 1.0
    logarithmic: bool = False

    def holds(self, low: float, high: float) -> bool:
        return self.y_low <= low and high <= self.y_high

    def across(self, x: float) -> float:
        """The position from left (0) to right (1)."""
        return _share(x, self.x_low, self.x_high)

    def up(self, y: float) -> float:
        """The position from bottom (0) to top (1)."""
        if self.logarithmic and y > 0 and self.y_low > 0:
            return _share(math.log(y), math.log(self.y_low), math.log(self.y_high))
        return _share(y, self.y_low, self.y_high)


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def finite(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def nice_step(span: float, most: int) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that gives at most `most` parts."""
    if span <= 0 or not math.isfinite(span):
        return 1.0
    raw = span / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10):
        if power * factor >= raw * (1 - 1e-9):
            return power * factor
    return power * 10


def y_axis(values: list[float], previous: Axes | None, logarithmic: bool) -> tuple[float, float]:
    """A y range around `values`. `previous` is kept if they fit in it and fill a third of it."""
    usable = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
    if not usable:
        return (1.0, 10.0) if logarithmic else (0.0, 1.0)
    low, high = min(usable), max(usable)
    if (
        previous is not None
        and previous.logarithmic == logarithmic
        and previous.holds(low, high)
        and high - low >= (previous.y_high - previous.y_low) / 3
    ):
        return previous.y_low, previous.y_high
    step = nice_step(max(high - low, abs(high) * 0.02, 1e-9), 5)
    bottom = math.floor(low / step) * step
    top = math.ceil(high / step) * step
    if top <= bottom:
        top = bottom + step
    if logarithmic and bottom <= 0:
        bottom = low * 0.9
    return bottom, top


def horizon(last: float, total: float | None) -> float:
    """Where the x axis ends: the run's length, else the next 1-2-5 number; it rarely moves."""
    if total and math.isfinite(total) and total >= last:
        return max(total, 1.0)
    if last <= 10:
        return 10.0
    power = 10.0 ** math.floor(math.log10(last))
    return next(power * f for f in (1, 2, 5, 10) if power * f >= last)


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


def number(value: float) -> str:
    """A short axis number."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    if size >= 100:
        return f"{value:,.0f}" if size < 10_000 else f"{value / 1000:.0f}k"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


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
        return Axes(0.0, horizon(0.0, total), *y_axis([], None, logarithmic), logarithmic)
    first, last = min(p[0] for p in points), max(p[0] for p in points)
    if recent:
        line = finite(series[0].points) if series else []
        first, last = (line[0][0], line[-1][0]) if line else (first, last)
        x_low, x_high = first, last if last > first else first + 1
    else:
        x_low, x_high = 0.0, horizon(last, total)
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
    unit: str = "step",
) -> list[Line]:
    """The chart in exactly `height` rows of at most `width` cells.

    `marks` are x positions shown on the x axis (epoch ends). `baseline` is a y value drawn as a
    dotted line.
    """
    if width <= 0 or height <= 0:
        return []
    margin = 6 if width >= 24 else 0
    body_width, body_height = (
        width - margin - (1 if margin else 0),
        height - (1 if height > 2 else 0),
    )
    canvas = _Canvas(max(1, body_width), max(1, body_height), glyphs)
    for one in series:
        _draw_series(one, axes, canvas)
    if baseline is not None and math.isfinite(baseline) and axes.holds(baseline, baseline):
        _draw_baseline(baseline, axes, canvas)
    labels = _y_labels(axes, body_height) if margin else {}
    lines: list[Line] = []
    for y in range(body_height):
        gutter: Line = []
        if margin:
            label = labels.get(y, "")
            gutter = [Span(right(label, margin) + ("┤" if label else "│"), "dim")]
        lines.append(gutter + canvas.row(y))
    if height > body_height:
        lines.append([Span(_x_axis(axes, margin, width, marks, unit), "dim")])
    return lines


def _y_labels(axes: Axes, height: int) -> dict[int, str]:
    """Row → number: 1-2-5 ticks, two or more rows apart; equal ratios on a logarithmic axis."""
    if height == 1:
        return {0: number(axes.y_high)}
    if axes.logarithmic and axes.y_low > 0:
        count = max(2, min(5, height // 3 + 1))
        ratio = axes.y_high / axes.y_low
        values = [axes.y_low * ratio ** (n / (count - 1)) for n in range(count)]
    else:
        span = axes.y_high - axes.y_low
        step = nice_step(span, max(1, min(5, (height - 1) // 2)))
        first = math.ceil(axes.y_low / step - 1e-9)
        values = [
            n * step for n in range(first, first + 12) if n * step <= axes.y_high + step / 1e6
        ]
    return {round((1.0 - axes.up(value)) * (height - 1)): number(value) for value in values}


def _x_axis(axes: Axes, margin: int, width: int, marks: tuple[float, ...], unit: str) -> str:
    start = f"{axes.x_low:,.0f}"
    end = f"{axes.x_high:,.0f} {unit}"
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
