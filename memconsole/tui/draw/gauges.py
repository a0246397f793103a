"""Memory gauges: used of total, a bar with the predicted peak as a tick, and the source. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from memconsole.devices.reading import Missing
from memconsole.runs.read.snapshot import Curve
from memconsole.tui.draw.bars import FULL, TICK, bar, sparkline
from memconsole.tui.draw.chart import horizon
from memconsole.tui.draw.ink import Line, Span, fit, width_of
from memconsole.tui.views import RunView
from memconsole.units import format_bytes

_ZOOM = 0.2
"""Below this share of the total the bar ends earlier, and says where."""


@dataclass(frozen=True)
class Gauge:
    """One bar. Bytes; `Missing` with its reason where nothing tells."""

    label: str
    used: int | Missing
    total: int | Missing
    peak: int | None = None
    predicted: int | None = None
    source: str = ""
    history: Curve = Curve()
    """Bytes by step."""
    last_step: float = 1.0
    """Where the history ends on the right."""
    zoom: bool = True
    """Whether the bar may end before the total, so that small amounts can be compared."""

    @property
    def scale(self) -> float:
        """Where the bar ends: the total, or for small amounts somewhat over the highest of them."""
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
    # The source gives way first: used and total are what one looks for.
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
    """The readings since the run began; a full cell is the predicted peak, an arrow is beyond it."""
    if gauge.predicted is not None:
        sign, full = TICK, float(gauge.predicted)
    else:
        sign, full = "peak", max(gauge.history.values, default=0.0)
    words = f" {FULL} = "
    # As long as the bar above it, unless that leaves too little for the words.
    length = max(4, width - 3 - max(len(_end_words(gauge)), len(words + sign)))
    points = zip(gauge.history.steps, gauge.history.values, strict=False)
    row = sparkline(points, gauge.last_step, full, length)
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


def run_gauges(view: RunView) -> list[Gauge]:
    """The gauges of a watched run: its device, its process tree, then the machine's own account."""
    run = view.snapshot
    if run is None:
        return []
    table = view.prediction.table if view.prediction else None
    memory, started = run.memory, run.started
    label = started.memory_label if started else table.budget.memory_label if table else "device"
    on_cpu = (started.device_kind if started else table.budget.kind if table else "") == "cpu"
    waiting = Missing("no reading yet" if view.live else "the run left none")
    used: int | Missing = waiting
    if memory is not None:
        figures = (memory.device_bytes, memory.reserved_bytes, memory.allocated_bytes)
        used = next((f for f in figures if f is not None), Missing("this device does not tell"))
    total: int | Missing = Missing("not reported")
    if memory is not None and memory.device_total_bytes is not None:
        total = memory.device_total_bytes
    elif table is not None:
        total = table.budget.total_bytes
    last_step = horizon(float(run.step), run.total_steps)
    gauges: list[Gauge] = []
    if not on_cpu:
        predicted = None if table is None else table.device_bytes
        gauges.append(
            Gauge(
                label=label,
                used=used,
                total=total,
                peak=run.peak_device_bytes,
                predicted=predicted,
                source="trainer",
                history=run.gauges.device,
                last_step=last_step,
            )
        )
        used = memory.allocated_bytes if memory and memory.allocated_bytes is not None else waiting
    gauges.append(
        Gauge(
            label=f"{label} tensors" if on_cpu else "allocated",
            used=used,
            total=total,
            peak=run.peak_bytes,
            predicted=table.peak_bytes if table is not None else None,
            source="trainer",
            history=run.gauges.allocated,
            last_step=last_step,
        )
    )
    host_total = next(
        (d.total_bytes for d in (view.devices.devices if view.devices else ()) if d.kind == "cpu"),
        Missing("not probed yet"),
    )
    host_used = memory.host_bytes if memory is not None else None
    gauges.append(
        Gauge(
            label="host RAM process" if on_cpu else "host RAM",
            used=host_used if host_used is not None else waiting,
            total=host_total,
            peak=run.peak_host_bytes,
            predicted=table.host_bytes if table is not None else None,
            source="psutil",
            history=run.gauges.host,
            last_step=last_step,
        )
    )
    return gauges
