"""Pure functions that draw memory gauges.

A gauge shows used of total, a bar with the predicted peak as a tick, and the source.
"""

from __future__ import annotations

from dataclasses import dataclass

from memconsole.devices.reading import Missing
from memconsole.runs.read.snapshot import Curve
from memconsole.tui.draw.bars import FULL, TICK, bar, sparkline
from memconsole.tui.draw.ink import Line, Span, fit, width_of
from memconsole.units import format_bytes

_ZOOM = 0.2
"""If less than this share of the total is used, the bar ends earlier, and its end is labelled."""


@dataclass(frozen=True)
class Gauge:
    """One bar. Values are bytes, or `Missing` with the reason."""

    label: str
    used: int | Missing
    total: int | Missing
    peak: int | None = None
    predicted: int | None = None
    source: str = ""
    history: Curve = Curve()
    """Bytes by step."""
    last_step: float = 1.0
    """The step at the right end of the history."""
    zoom: bool = True
    """Whether the bar may end before the total, so that small amounts can be compared."""

    @property
    def scale(self) -> float:
        """Where the bar ends: the total, or somewhat above the highest value if that is small."""
        used = self.used if isinstance(self.used, int) else 0
        highest = max(used, self.peak or 0, self.predicted or 0)
        total = self.total if isinstance(self.total, int) else 0
        if total and (not self.zoom or highest >= total * _ZOOM):
            return float(max(total, highest))
        return highest * 1.25 if highest else float(total)


def gauge_lines(gauge: Gauge, width: int) -> list[Line]:
    """Two rows, or one if nothing can be read: text first, then the bar with the tick."""
    if isinstance(gauge.used, Missing):
        return [
            [
                Span(f" {gauge.label} ", "strong"),
                Span(fit(f"n/a — {gauge.used.reason}", width - len(gauge.label) - 2), "dim"),
            ]
        ]
    total = format_bytes(gauge.total) if isinstance(gauge.total, int) else "n/a"
    # The source is dropped first: used and total matter more.
    words = f"{format_bytes(gauge.used)} / {total}"
    label = fit(gauge.label, width - len(words) - 2)
    head: Line = [Span(f" {label} ", "strong"), Span(words)]
    if gauge.source and width_of(head) + len(gauge.source) + 2 <= width:
        head.append(Span(f"  {gauge.source}", "dim"))
    end = _end_words(gauge)
    length = max(4, width - len(end) - 3)
    tick = float(gauge.predicted) if gauge.predicted is not None else None
    over = gauge.predicted is not None and max(gauge.used, gauge.peak or 0) > gauge.predicted
    row = bar(float(gauge.used), gauge.scale, length, tick=tick, role="warn" if over else "train")
    return [head, [Span("▕", "dim"), *row, Span("▏", "dim"), Span(end, "dim")]]


def history_line(gauge: Gauge, width: int) -> Line:
    """The readings since the run began. A full cell is the predicted peak; an arrow is above it."""
    if gauge.predicted is not None:
        sign, full = TICK, float(gauge.predicted)
    else:
        sign, full = "peak", max(gauge.history.values, default=0.0)
    words = f" {FULL} = "
    # As long as the bar above it, unless that leaves too little room for the words.
    length = max(4, width - 3 - max(len(_end_words(gauge)), len(words + sign)))
    row = sparkline(gauge.history.points, gauge.last_step, full, length)
    key: Line = [Span("▏", "dim"), Span(words, "dim"), Span(sign, "tick")]
    return [Span("▕", "dim"), *row, *key]


def _end_words(gauge: Gauge) -> str:
    scale = gauge.scale
    zoomed = not isinstance(gauge.total, int) or scale < gauge.total
    return f" {format_bytes(scale)}" if zoomed and scale else ""


def peak_line(gauge: Gauge, width: int) -> Line:
    """``peak 530 MiB  ~620 MiB predicted ┃``."""
    peak = "—" if gauge.peak is None else format_bytes(gauge.peak)
    line: Line = [Span(" peak ", "dim"), Span(peak)]
    if gauge.predicted is not None:
        text = f"  ┃ predicted ~{format_bytes(gauge.predicted)}"
        line.append(Span(fit(text, width - 6 - len(peak)), "tick"))
    return line
