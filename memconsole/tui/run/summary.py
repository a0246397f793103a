"""The summary of a run: losses, time, and its memory predicted and measured. Pure in the view."""

from __future__ import annotations

from collections.abc import Collection

from memconsole.plan.tasks import task_of
from memconsole.runs.read.report.comparison import Comparison, EstimatedTable, compare
from memconsole.runs.read.report.measured import (
    is_lower_bound,
    measured_of,
    on_cpu,
    shortfall_of,
)
from memconsole.runs.read.shown.jumps import jump_words
from memconsole.runs.read.shown.missing import marked, missing_words
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.words import NOTHING_LEARNED
from memconsole.runs.read.state.figures import best_evaluation, figures
from memconsole.runs.read.state.stages import during
from memconsole.tui.draw.lines import Line, Span, fit, left, wrap
from memconsole.tui.draw.words import (
    difference_word,
    loss_word,
    measure_word,
    minutes_word,
    rate_word,
)
from memconsole.tui.run.phases import phase_rows
from memconsole.tui.views.run_view import RunView
from memconsole.units import format_bytes, format_duration

_NAMES = {"allocated": "memory peak", "device": "device peak", "host": "host RAM peak"}
_HEAD = 17
"""Cells of the names of rows."""

Row = tuple[str, str, str]
"""A name, a text and the text's role."""


def summary_lines(view: RunView, width: int) -> list[Line]:
    """The final summary, or the results so far of a live run."""
    lines: list[Line] = []
    for name, text, role in summary_rows(view):
        head = Span(" " + left(name, _HEAD), "dim")
        for n, piece in enumerate(wrap(text, width - _HEAD - 1, 3) or [""]):
            lines.append([head if n == 0 else Span(" " * (_HEAD + 1)), Span(piece, role)])
    if view.snapshot is not None and view.live:
        so_far = f" so far, {format_duration(view.snapshot.elapsed_seconds)}"
        lines.insert(0, [Span(fit(so_far, width), "dim")])
    return lines


def summary_rows(view: RunView) -> list[Row]:
    """The final summary as (name, value, role)."""
    run = view.snapshot
    if run is None:
        return []
    facts = run.facts
    rows = _loss_rows(run)
    if facts.ended is not None and facts.ended.early:
        rows.append(("ended", facts.ended.early, ""))
    rows.append(("time", _time_words(run), ""))
    device = facts.started.device_name if facts.started else run.plan.device.name
    rows.append(("device", f"{device} · {run.plan.backend}", ""))
    rows += memory_rows(view, run)
    if facts.jump is not None:
        rows.append(("jumps", jump_words(facts.jump), ""))
    by_phase = " · ".join(f"{name.strip(' ▸')} {words}" for name, words in phase_rows(view))
    rows += [("memory by phase", by_phase, "")] if by_phase else []
    rows.append(("run", f"{run.id} · step {facts.step:,} · attempts {run.attempt}", ""))
    if run.missing_records:
        rows.append(("event log", missing_words(run.missing_records), "warn"))
    return rows


def _loss_rows(run: RunSnapshot) -> list[Row]:
    """The losses, and what evaluations measured beside them."""
    task = task_of(run.plan)
    rows: list[Row] = []
    if run.best_validation_loss is not None or run.evaluations:
        rows.append(("validation loss", _validation_words(run), "validation"))
    best = best_evaluation(task, run.evaluations)
    if best is not None and best.measure.key != task.loss.key:
        text = marked(best.words, "evaluations", run.uncertain)
        rows.append(("best checkpoint", text, "validation"))
    if run.evaluations:
        every = figures(task, run.evaluations[-1], summary=True)
        others = [figure for figure in every if not figure.measure.headline]
        if others:
            text = " · ".join(f"{measure_word(f.value)} {f.measure.name}" for f in others)
            rows.append(("beside it", text, "validation"))
    train = run.final_train_loss
    if run.facts.loss is not None or train is not None:
        text = marked(loss_word(train, NOTHING_LEARNED), "final_train_loss", run.uncertain)
        rows.append(("final train loss", text, "train"))
    return rows


def _validation_words(run: RunSnapshot) -> str:
    """The best and the final validation loss, and the headline figures of the last evaluation."""
    best, final = run.best_validation_loss, run.final_validation_loss
    text = f"best {marked(loss_word(best), 'best_validation_loss', run.uncertain)} · "
    text += f"final {marked(loss_word(final), 'final_validation_loss', run.uncertain)}"
    if not run.evaluations:
        return text
    last = run.evaluations[-1]
    if last.train_loss is not None:
        text += f" · {loss_word(last.train_loss)} on training rows"
    for figure in figures(task_of(run.plan), last):
        words = (measure_word(figure.value), figure.measure.name)
        text += f" · {' '.join(reversed(words) if figure.baseline else words)}"
    return text


def _time_words(run: RunSnapshot) -> str:
    """The time of an epoch and in all, and the speed."""
    words = marked(f"{minutes_word(run.minutes)} minutes trained", "total_minutes", run.uncertain)
    if run.average_epoch_minutes is not None:
        epoch = f"{minutes_word(run.average_epoch_minutes)} min/epoch"
        words = f"{marked(epoch, 'average_epoch_minutes', run.uncertain)} · {words}"
    if run.units_per_second is not None:
        words += f" · {rate_word(run.units_per_second)} {task_of(run.plan).units}/s"
    return words


def memory_rows(view: RunView, run: RunSnapshot) -> list[Row]:
    """One row per measured or predicted figure, and the shortfall if the run ran out of memory."""
    rows = [
        (_NAMES[figure.name], comparison_words(figure, run.uncertain), _role(figure))
        for figure in compared(view, run)
        if figure.name in _NAMES
    ]
    facts = run.facts
    error = facts.error
    if view.out_of_memory and error is not None and error.requested_bytes:
        shortfall = shortfall_of(facts)
        text = f"asked for {format_bytes(error.requested_bytes)} more {during(facts.phase)}"
        if shortfall is not None:
            text += f": needed at least {format_bytes(shortfall.needed_bytes)}"
        rows.insert(1, ("out of memory", text, "bad"))
    return rows


def compared(view: RunView, run: RunSnapshot) -> tuple[Comparison, ...]:
    """Prediction and measurement side by side, computed as in the run's receipt."""
    table = view.prediction.table if view.prediction else None
    estimated = None
    if table is not None:
        fields = EstimatedTable.__struct_fields__
        estimated = EstimatedTable(**{name: getattr(table, name) for name in fields})
    facts = run.facts
    # The peak may still rise until a run has taken its steps.
    at_least = view.live or is_lower_bound(facts, ran_out=view.out_of_memory)
    rows = compare(estimated, measured_of(facts), facts.peaks_by_phase, at_least)
    # On a CPU only the trainer's own allocations are charged to it, so one row is enough.
    return tuple(row for row in rows if not (on_cpu(facts) and row.name == "device"))


def comparison_words(figure: Comparison, uncertain: Collection[str] = ()) -> str:
    """``measured 171 MiB · predicted =168 MiB (2 % less), inside its band 160 MiB to 176 MiB``."""
    seen = "n/a" if figure.measured_bytes is None else format_bytes(figure.measured_bytes)
    text = "measured " + ("≥ " if figure.at_least else "")
    text += marked(seen, "memory.measured", uncertain)
    if figure.estimated_bytes is None:
        return text
    text += f" · predicted {figure.tier}{format_bytes(figure.estimated_bytes)}"
    if figure.error_percent is not None and not figure.at_least:
        text += f" ({difference_word(figure.error_percent)})"
    if figure.band_bytes is not None:
        place = {True: "inside its", False: "outside its", None: "its"}[figure.inside_band]
        low, high = figure.band_bytes
        text += f", {place} band {format_bytes(low)} to {format_bytes(high)}"
    return text


def _role(figure: Comparison) -> str:
    return {True: "good", False: "warn", None: ""}[figure.inside_band]
