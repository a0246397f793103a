"""The charts of a run: its loss, and everything else that it logs. Pure in the view."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from memconsole.plan.tasks import Measure, task_of
from memconsole.runs.read.curves.curve import Curve
from memconsole.runs.read.shown.ranks import rank_word
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.state.figures import baseline_of
from memconsole.tui.draw.chart import Series
from memconsole.tui.draw.words import measure_word, rate_word
from memconsole.tui.views.run_view import RunView
from memconsole.units import MIB, format_bytes

ORDERS = 30.0
"""A series has a logarithmic axis if its largest value is at least this many times its smallest."""
LOSS = "loss"


@dataclass(frozen=True)
class Chart:
    """One chart: its curves and the last exact value in words."""

    name: str
    series: tuple[Series, ...]
    last: str = ""
    baseline: float | None = None
    may_be_logarithmic: bool = True

    @property
    def logarithmic(self) -> bool:
        """Whether its values span orders of magnitude."""
        if not self.may_be_logarithmic:
            return False
        values = [y for series in self.series for _, y in series.points if math.isfinite(y)]
        return bool(values) and min(values) > 0 and max(values) >= ORDERS * min(values)


def charts_of(view: RunView) -> tuple[Chart, ...]:
    """The loss first, then every other logged series that has values."""
    run = view.snapshot
    if run is None:
        return ()
    steps = run.recent_series if view.recent else run.series
    facts = run.facts
    units = f"{task_of(run.plan).units}/s"
    others = (
        *_measures(run),
        _line("gradient norm", steps.gradient_norm, facts.gradient_norm, "{:.3g}"),
        _line(units, steps.units_per_second, run.units_per_second, "", logarithmic=False),
        _line("learning rate", steps.learning_rate, facts.learning_rate, "{:.2e}", False),
        *_memory(view, run),
    )
    return (loss_chart(run, view.recent), *(c for c in others if any(s.points for s in c.series)))


def large_chart(view: RunView) -> Chart | None:
    """The large chart."""
    charts = charts_of(view)
    return charts[view.chart % len(charts)] if charts else None


def is_logarithmic(chart: Chart, view: RunView) -> bool:
    """Whether the large chart has a logarithmic axis: decided by its values, unless the user has switched it."""
    return chart.logarithmic if view.logarithmic is None else view.logarithmic


def loss_chart(run: RunSnapshot, recent: bool) -> Chart:
    """Training as a line, evaluations of training rows and of validation rows as marks, the best
    baseline."""
    train = run.recent_train if recent and run.recent_train.steps else run.train
    beside = tuple(
        (float(e.step), e.train_loss) for e in run.evaluations if e.train_loss is not None
    )
    series = (
        Series(train.points, "train"),
        *([Series(beside, "train", marker="◇")] if beside else []),
        Series(run.validation.points, "validation", marker="◆"),
    )
    baseline = baseline_of(task_of(run.plan), run.evaluations)
    return Chart(LOSS, series, baseline=None if baseline is None else baseline.value)


def _line(
    name: str, curve: Curve, last: float | None, written: str, logarithmic: bool = True
) -> Chart:
    words = ""
    if last is not None:
        words = written.format(last) if written else rate_word(last)
    return Chart(name, (Series(curve.points),), words, may_be_logarithmic=logarithmic)


def _measures(run: RunSnapshot) -> Iterable[Chart]:
    """The task's measures at each evaluation."""
    task = task_of(run.plan)
    for measure in (*task.measures, *task.derived):
        points = tuple(
            (float(evaluation.step), value)
            for evaluation in run.evaluations
            if (value := _value(measure, evaluation.metrics, evaluation.bits_per_byte)) is not None
        )
        if points and measure.headline:
            marks = Series(points, "validation", marker="◆")
            line = (Series(points, "baseline"),) if len(points) > 1 else ()
            yield Chart(measure.name, (*line, marks), measure_word(points[-1][1]))


def _value(measure: Measure, metrics: dict[str, float], bits: float | None) -> float | None:
    value = bits if measure.key == "bits_per_byte" else metrics.get(measure.key)
    return value if value is not None and math.isfinite(value) else None


def _memory(view: RunView, run: RunSnapshot) -> Iterable[Chart]:
    """What the gauges have shown, in MiB, each with its prediction."""
    table = view.prediction.table if view.prediction is not None else None
    started = run.facts.started
    label = started.memory_label if started is not None else "device"
    # On a CPU the device is the host's RAM too, and the last row has the whole process.
    on_cpu = started is not None and started.device_kind == "cpu"
    device = "on device" if on_cpu else f"{label} process"
    rows = (
        (f"{label} tensors", run.gauges.allocated, table.peak_bytes if table else None),
        (device, run.gauges.device, table.device_bytes if table else None),
        ("host RAM process", run.gauges.host, table.host_bytes if table else None),
    )
    first = f" of {rank_word(run.facts)} 0" if run.facts.rank_count > 1 else ""
    for name, curve, predicted in rows:
        if curve.steps:
            yield Chart(
                f"{name}{first}, MiB",
                (Series(tuple((x, y / MIB) for x, y in curve.points)),),
                format_bytes(curve.values[-1]),
                None if predicted is None else predicted / MIB,
                may_be_logarithmic=False,
            )
