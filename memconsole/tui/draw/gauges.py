"""Pure functions that draw memory gauges.

A gauge is a bar with a scale of its own: what is used now, the highest so far, and the predicted peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memconsole.devices.reading import Missing
from memconsole.runs.read.curves.curve import Curve
from memconsole.tui.draw.bars import FULL, REACHED, TICK, area, bar
from memconsole.tui.draw.lines import Line, Span, fit, width_of, wrap
from memconsole.units import GIB, KIB, MIB, format_bytes

FILLING, FULL_SHARE = 0.85, 0.95
"""Shares of the limit from which a gauge is yellow and red."""
NO_BAND = 0.1
"""How far above a prediction without a band a value may be."""
_ZOOM = 0.5
"""If less than this share of the total is used, the bar ends at a smaller round number."""
_ROUND = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
_REASON_ROWS = 5
"""More than the longest reason needs in the narrowest panel."""


def signs(live: bool) -> str:
    """The key to the bars; of a run that has ended, their last readings."""
    return f"{FULL} {'now' if live else 'last'} {REACHED} peak {TICK} predicted"


@dataclass(frozen=True)
class Gauge:
    """One bar. Values are bytes, or `Missing` with the reason."""

    label: str
    used: int | Missing
    total: int | Missing
    peak: int | None = None
    predicted: int | None = None
    high: int | None = None
    """The upper end of the prediction's band."""
    limit: int | None = None
    """The most bytes that may be used; None if unknown."""
    source: str = ""
    history: Curve = Curve()
    """Bytes by step."""
    last_step: float = 1.0
    """The step at the right end of the history."""
    zoom: bool = True
    """Whether the bar may end before the total, so that small amounts can be compared."""

    @property
    def highest(self) -> int:
        """The most that was seen."""
        return max(self.used if isinstance(self.used, int) else 0, self.peak or 0)

    @property
    def expected(self) -> int | None:
        """The most that the prediction allows for."""
        if self.predicted is None:
            return None
        return max(self.predicted, self.high or round(self.predicted * (1 + NO_BAND)))

    @property
    def scale(self) -> float:
        """Where the bar ends: the total, or a round number above every value if they are small."""
        highest = max(self.highest, self.predicted or 0)
        total = self.total if isinstance(self.total, int) else 0
        if total and (not self.zoom or highest >= total * _ZOOM):
            return float(max(total, highest))
        return round_bytes(highest * 1.1) if highest else float(total)

    @property
    def zoomed(self) -> bool:
        """Whether the bar ends elsewhere than at the total."""
        return not isinstance(self.total, int) or self.scale != self.total

    @property
    def level(self) -> tuple[str, str]:
        """The role of the bar, and why it is not green."""
        if self.limit and self.highest >= self.limit * FULL_SHARE:
            return "bad", "nearly full"
        if self.limit and self.highest >= self.limit * FILLING:
            return "warn", "filling up"
        if self.expected is not None and self.highest > self.expected:
            return "warn", "more than predicted"
        return "good", ""


def round_bytes(least: float) -> float:
    """The smallest round number of MiB or GiB (below: KiB) that is not less."""
    unit = next((u for u in (GIB, MIB, KIB) if least >= u), 1)
    power = 10.0 ** math.floor(math.log10(max(1.0, least / unit)))
    return next(power * r * unit for r in _ROUND if power * r * unit >= least * (1 - 1e-12))


def missing_lines(label: str, reason: str, width: int) -> list[Line]:
    """Why there is no number: beside the label if it fits there, else whole on rows of its own."""
    head = Span(f" {label} ", "strong")
    for words in (f"n/a — {reason}", f"— {reason}"):
        if width_of([head, Span(words)]) <= width:
            return [[head, Span(words, "dim")]]
    return [
        [Span(fit(head.text, width - 4), "strong"), Span("n/a:", "dim")],
        *([Span(f"   {row}", "dim")] for row in wrap(reason, width - 3, _REASON_ROWS)),
    ]


def gauge_lines(gauge: Gauge, width: int) -> list[Line]:
    """The amount, then the bar and where it ends; if nothing can be read, the reason."""
    if isinstance(gauge.used, Missing):
        return missing_lines(gauge.label, gauge.used.reason, width)
    words, more = format_bytes(gauge.used), [gauge.source]
    if not gauge.zoomed:
        words += f" / {format_bytes(gauge.scale)}"
    elif isinstance(gauge.total, int):
        more = [f"{gauge.used / gauge.total:.1%} of {format_bytes(gauge.total)}", *more]
    label = fit(gauge.label, width - len(words) - 2)
    head: Line = [Span(f" {label} ", "strong"), Span(words)]
    for text in more:  # what matters least is left out first
        if text and width_of(head) + len(text) + 2 <= width:
            head.append(Span(f"  {text}", "dim"))
    end = f" {format_bytes(gauge.scale)}" if gauge.zoomed and gauge.scale else ""
    length = max(4, width - len(end) - 3)
    row = bar(
        float(gauge.used),
        gauge.scale,
        length,
        tick=None if gauge.predicted is None else float(gauge.predicted),
        reached=None if gauge.peak is None else float(gauge.peak),
        role=gauge.level[0],
    )
    return [head, [Span(" ▕", "dim"), *row, Span("▏", "dim"), Span(end, "dim")]]


def history_lines(gauge: Gauge, width: int, rows: int) -> list[Line]:
    """The readings since the run began on the bar's scale, with a dotted line at the prediction."""
    ends = (f" {format_bytes(gauge.scale)}", " 0")
    length = max(4, width - 3 - max(map(len, ends)))
    drawn = area(
        gauge.history.points,
        gauge.last_step,
        gauge.scale,
        length,
        rows,
        line=None if gauge.predicted is None else float(gauge.predicted),
        most=None if gauge.expected is None else float(gauge.expected),
    )
    lines: list[Line] = []
    for y, row in enumerate(drawn):
        end = ends[0] if y == 0 else ends[1] if y == rows - 1 else ""
        lines.append([Span(" ▕", "dim"), *row, Span("▏", "dim"), Span(end, "dim")])
    return lines


def peak_line(gauge: Gauge, width: int, whose: str = "") -> Line:
    """``peak 530 MiB, 85 % of predicted 620 MiB``, then why the gauge is not green. `whose` names the
    rank that has the peak, if there are several."""
    peak = "—" if gauge.peak is None else format_bytes(gauge.peak)
    peak += f" ({whose})" if whose else ""
    line: Line = [Span(" peak ", "dim"), Span(peak)]
    role, why = gauge.level
    if gauge.predicted is not None:
        size = format_bytes(gauge.predicted)
        long, short = Span(f" predicted {size}", "tick"), Span(f" {TICK} {size}", "tick")
        forms = [[Span(" ·", "tick"), long], [short]]
        if gauge.peak and gauge.predicted:
            share = Span(f", {100 * gauge.peak / gauge.predicted:.0f} % of", role)
            forms = [[share, long], forms[0], [share, short], [short]]
        line += next((form for form in forms if width_of([*line, *form]) <= width), [])
    reason = Span(f" · {why}", role)
    if why and width_of([*line, reason]) <= width:
        line.append(reason)
    return line


def whole_line(label: str, used: int, total: int, width: int, note: str = "") -> Line:
    """One row: how full a device is with everything that runs on it, and a bar to its total."""
    words = f" {label} {format_bytes(used)} / {format_bytes(total)} "
    gauge = Gauge(label, used, total, limit=total, zoom=False)
    room = width - len(words) - 2
    if room < 4:
        return [Span(fit(words, width), "dim")]
    line: Line = [Span(words, "dim"), Span("▕", "dim")]
    tail = f" {note}" if note and room - len(note) - 1 >= 8 else ""
    row = bar(float(used), float(total), room - len(tail), role=gauge.level[0])
    return [*line, *row, Span("▏", "dim"), Span(tail, "dim")]
