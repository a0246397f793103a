"""A run's speed, losses and sizes: one row each."""

from __future__ import annotations

from memconsole.plan.tasks import task_of
from memconsole.runs.read.shown.ranks import each_per_second
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.tui.draw.lines import Line, Span, fit, left, rule
from memconsole.tui.draw.words import measure_word, rate_word, step_word
from memconsole.tui.run.phases import Row, jump_rows, phase_rows
from memconsole.tui.views.run_view import RunView
from memconsole.units import format_count, format_duration

FIGURES = 3
"""Rows that histories, and gauges beside ranks, leave free for the figures."""


def figure_lines(view: RunView, width: int, height: int) -> list[Line]:
    """Speed, losses and size: one row each."""
    run = view.snapshot
    if run is None:
        return []
    rows = _figures(view, run, together=height < FIGURES)
    lines = [rule("speed", width)] if height > 3 else []
    lines += [
        [Span(" " + left(name, 16), "dim"), Span(fit(text, width - 17))] for name, text in rows
    ]
    return lines[:height]


def _figures(view: RunView, run: RunSnapshot, *, together: bool) -> list[Row]:
    """Name and text of every known figure, the most important ones first. `together`: the speed is one row."""
    facts = run.facts
    task = task_of(run.plan)
    rows = _speed_rows(view, run, task.units, together=together)
    rows += [*jump_rows(view), *phase_rows(view)]
    if view.prediction is not None and view.prediction.peak_is_known and run.units_per_second:
        share = run.units_per_second / view.prediction.peak_tokens_per_second
        rows.append(("MFU", f"{share:.1%} of peak"))
    if run.best_validation_loss is not None:
        rows.append(("best validation", measure_word(run.best_validation_loss)))
    if facts.step_seconds is not None:
        rows.append(("step", step_word(facts.step_seconds)))
    rows.append(("trained", f"{format_count(facts.tokens)} {task.units}"))
    if facts.learning_rate is not None:
        rows.append(("learning rate", f"{facts.learning_rate:.2e}"))
    if facts.gradient_norm is not None:
        rows.append(("gradient norm", f"{facts.gradient_norm:.3g}"))
    if facts.parameters is not None:
        rows.append(("parameters", format_count(facts.parameters)))
    if facts.checkpoint is not None:
        rows.append(("checkpoint", f"step {facts.checkpoint.step:,}"))
    rows.append(("elapsed", format_duration(run.elapsed_seconds)))
    return rows


def _speed_rows(view: RunView, run: RunSnapshot, units: str, *, together: bool) -> list[Row]:
    """The speed in all, and of each device if there are several; `together`: in one row."""
    words = rate_word(run.units_per_second)
    each = each_per_second(run.plan, run.units_per_second)
    guess = f"  (~{rate_word(view.prediction.tokens_per_second)})" if view.prediction else ""
    if each is None:
        return [(f"{units}/s", words + guess)]
    if together:
        return [(f"{units}/s, each", f"{words} · {rate_word(each)}")]
    return [(f"{units}/s", words + guess), ("  each device", rate_word(each))]
