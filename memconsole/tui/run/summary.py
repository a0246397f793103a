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


def summary_rows(view: RunView) -> list[tuple[str, str, str]]:
    """The final summary as (name, value, role)."""
    run = view.snapshot
    if run is None:
        return []
    facts = run.facts
    ended = facts.ended
    rows: list[tuple[str, str, str]] = []
    best, final = run.best_validation_loss, run.final_validation_loss
    if best is not None or run.evaluations:
        text = f"best {marked(loss_word(best), 'best_validation_loss', run.uncertain)} · "
        text += f"final {marked(loss_word(final), 'final_validation_loss', run.uncertain)}"
        beside = run.evaluations[-1].train_loss if run.evaluations else None
        if beside is not None:
            text += f" · {loss_word(beside)} on training rows"
        for found in figures(task_of(run.plan), run.evaluations[-1]) if run.evaluations else ():
            words = (measure_word(found.value), found.measure.name)
            text += f" · {' '.join(reversed(words) if found.baseline else words)}"
        rows.append(("validation loss", text, "validation"))
    by = best_evaluation(task_of(run.plan), run.evaluations)
    if by is not None and by.measure.key != task_of(run.plan).loss.key:
        text = marked(by.words, "evaluations", run.uncertain)
        rows.append(("best checkpoint", text, "validation"))
    if run.evaluations:
        whole = figures(task_of(run.plan), run.evaluations[-1], summary=True)
        simpler = [f for f in whole if not f.measure.headline]
        if simpler:
            text = " · ".join(f"{measure_word(f.value)} {f.measure.name}" for f in simpler)
            rows.append(("beside it", text, "validation"))
    train = run.final_train_loss
    if facts.loss is not None or train is not None:
        text = marked(loss_word(train, NOTHING_LEARNED), "final_train_loss", run.uncertain)
        rows.append(("final train loss", text, "train"))
    if ended is not None and ended.early:
        rows.append(("ended", ended.early, ""))
    minutes = run.average_epoch_minutes
    time = marked(f"{minutes_word(run.minutes)} minutes trained", "total_minutes", run.uncertain)
    if minutes is not None:
        each = f"{minutes_word(minutes)} min/epoch"
        time = f"{marked(each, 'average_epoch_minutes', run.uncertain)} · {time}"
    if run.units_per_second is not None:
        time += f" · {rate_word(run.units_per_second)} {task_of(run.plan).units}/s"
    rows.append(("time", time, ""))
    device = facts.started.device_name if facts.started else run.plan.device.name
    rows.append(("device", f"{device} · {run.plan.backend}", ""))
    rows += memory_rows(view, run)
    if run.facts.jump is not None:
        rows.append(("jumps", jump_words(run.facts.jump), ""))
    by_phase = " · ".join(f"{name.strip(' ▸')} {words}" for name, words in phase_rows(view))
    rows += [("memory by phase", by_phase, "")] if by_phase else []
    rows.append(("run", f"{run.id} · step {facts.step:,} · attempts {run.attempt}", ""))
    if run.missing_records:
        rows.append(("event log", missing_words(run.missing_records), "warn"))
    return rows


def memory_rows(view: RunView, run: RunSnapshot) -> list[tuple[str, str, str]]:
    """One row per measured or predicted figure, and the shortfall if the run ran out of memory."""
    rows = [
        (_NAMES[one.name], comparison_words(one, run.uncertain), _role(one))
        for one in compared(view, run)
        if one.name in _NAMES
    ]
    facts = run.facts
    error = facts.error
    if view.out_of_memory and error is not None and error.requested_bytes:
        lacked = shortfall_of(facts)
        text = f"asked for {format_bytes(error.requested_bytes)} more {during(facts.phase)}"
        if lacked is not None:
            text += f": needed at least {format_bytes(lacked.needed_bytes)}"
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


def comparison_words(one: Comparison, uncertain: Collection[str] = ()) -> str:
    """``measured 171 MiB · predicted =168 MiB (2 % less), inside its band 160 MiB to 176 MiB``."""
    seen = "n/a" if one.measured_bytes is None else format_bytes(one.measured_bytes)
    text = "measured " + ("≥ " if one.at_least else "")
    text += marked(seen, "memory.measured", uncertain)
    if one.estimated_bytes is None:
        return text
    text += f" · predicted {one.tier}{format_bytes(one.estimated_bytes)}"
    if one.error_percent is not None and not one.at_least:
        text += f" ({difference_word(one.error_percent)})"
    if one.band_bytes is not None:
        place = {True: "inside its", False: "outside its", None: "its"}[one.inside_band]
        low, high = one.band_bytes
        text += f", {place} band {format_bytes(low)} to {format_bytes(high)}"
    return text


def _role(one: Comparison) -> str:
    return {True: "good", False: "warn", None: ""}[one.inside_band]
