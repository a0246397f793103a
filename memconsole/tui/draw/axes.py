"""The axes of a chart: ranges that rarely move, and round numbers along them. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

LABEL_CELLS = 6
"""Cells of the numbers left of a chart."""


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


def nice_ratio(value: float, *, up: bool) -> float:
    """The next 1, 2 or 5 times a power of ten at or above a positive value, or at or below it."""
    power = 10.0 ** math.floor(math.log10(value))
    parts = [power * factor for factor in (1, 2, 5, 10)]
    if up:
        return next(part for part in parts if part >= value * (1 - 1e-9))
    return next(part for part in reversed(parts) if part <= value * (1 + 1e-9))


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
    if logarithmic:
        return nice_ratio(low, up=False), nice_ratio(high * 1.0001, up=True)
    step = nice_step(max(high - low, abs(high) * 0.02, 1e-9), 5)
    bottom = math.floor(low / step) * step
    top = math.ceil(high / step) * step
    if top <= bottom:
        top = bottom + step
    return bottom, top


def x_axis_end(last: float, total: float | None) -> float:
    """Where the x axis ends: the run's length, else the next 1-2-5 number; it rarely moves."""
    if total and math.isfinite(total) and total >= last:
        return max(total, 1.0)
    if last <= 10:
        return 10.0
    power = 10.0 ** math.floor(math.log10(last))
    return next(power * f for f in (1, 2, 5, 10) if power * f >= last)


def number(value: float) -> str:
    """A short axis number."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        fine, coarse = (_scientific(f"{value:.{digits}e}") for digits in (1, 0))
        return fine if len(fine) <= LABEL_CELLS else coarse
    if size >= 100:
        return f"{value:,.0f}" if size < 10_000 else f"{value / 1000:.0f}k"
    if size < 0.1:
        return f"{value:.2g}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _scientific(written: str) -> str:
    mantissa, _, power = written.partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def y_labels(axes: Axes, height: int) -> dict[int, str]:
    """Row → number: 1-2-5 ticks, two or more rows apart."""
    if height == 1:
        return {0: number(axes.y_high)}
    if axes.logarithmic and axes.y_low > 0:
        return _log_labels(axes, height)
    # Fewer numbers differ in an earlier digit.
    for parts in range(max(1, min(5, (height - 1) // 2)), 0, -1):
        values = _ticks(axes, parts)
        written = _written(values)
        if len(set(written)) == len(written):
            break
    return {_row_of(axes, v, height): word for v, word in zip(values, written, strict=True)}


def _ticks(axes: Axes, parts: int) -> list[float]:
    step = nice_step(axes.y_high - axes.y_low, parts)
    first = math.ceil(axes.y_low / step - 1e-9)
    return [n * step for n in range(first, first + 12) if n * step <= axes.y_high + step / 1e6]


def _written(values: list[float]) -> list[str]:
    step = values[1] - values[0] if len(values) > 1 else 0.0
    largest = max(map(abs, values), default=0.0)
    if 0 < step < 0.0999 * largest and (later := _later_digits(values, step)):
        return later
    return [number(value) for value in values]


def _later_digits(values: list[float], step: float) -> list[str] | None:
    """Numbers that first differ in later digits, such as 25.70M and 25.75M; None if they do not fit."""
    for unit, letter in ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        digits = max(0, math.ceil(-math.log10(step / unit) - 1e-6))
        written = [f"{value / unit:,.{digits}f}{letter}" for value in values]
        if any(len(word) > LABEL_CELLS for word in written):
            written = [
                word.replace("0.", ".", 1) if abs(v) < unit else word
                for v, word in zip(values, written, strict=True)
            ]
        if all(len(word) <= LABEL_CELLS for word in written):
            return written
    return None


def _row_of(axes: Axes, value: float, height: int) -> int:
    return round((1.0 - axes.up(value)) * (height - 1))


def _log_labels(axes: Axes, height: int) -> dict[int, str]:
    """As many of the multiples 1-2-5, 1-5 or 1 of powers of ten as fit two rows apart."""
    low, high = (math.floor(math.log10(axes.y_low)), math.ceil(math.log10(axes.y_high)))
    rows: dict[int, str] = {}
    for factors in ((1, 2, 5), (1, 5), (1,)):
        values = [10.0**p * f for p in range(low, high + 1) for f in factors]
        shown = [v for v in values if axes.y_low * 0.999 <= v <= axes.y_high * 1.001]
        if len(shown) < 2:
            shown = [axes.y_low, axes.y_high]
        places = [_row_of(axes, value, height) for value in shown]
        rows = {
            place: f"{value:g}" if 1e-3 <= value < 1e4 else number(value)
            for place, value in zip(places, shown, strict=True)
        }
        if all(a - b >= 2 for a, b in pairwise(places)):
            return rows
    return dict(sorted(rows.items())[:: max(1, 2 * len(rows) // max(1, height))])
