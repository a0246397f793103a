"""The run screen's gauges and figures: memory predicted and measured, speed, loss."""

from __future__ import annotations

from memconsole.devices.reading import Missing
from memconsole.plan.tasks import task_of
from memconsole.runs.read.shown.ranks import each_per_second
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.tui.draw.gauges import (
    gauge_lines,
    history_lines,
    missing_lines,
    peak_line,
    signs,
    whole_line,
)
from memconsole.tui.draw.lines import Line, Span, fit, left, rule
from memconsole.tui.draw.words import measure_word, number_or_reason, rate_word, step_word
from memconsole.tui.run.phases import jump_rows, phase_rows
from memconsole.tui.run.rank_gauges import rank_section
from memconsole.tui.run.run_gauges import run_gauges
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_count, format_duration

FIGURES = 3
"""Rows that histories, and gauges beside ranks, leave free for the figures."""
MOST_ROWS, LEAST_ROWS = 4, 2
"""Rows of one history, if there is room for those of all gauges."""


def memory_lines(view: RunView, width: int, height: int) -> list[Line]:
    """Every gauge with its peak, prediction and, if there is room, its history.

    The last row shows how full the whole device is.
    """
    gauges = run_gauges(view)
    section = rank_section(view, gauges[-2], width) if gauges else None
    ranks: list[Line] = []
    title, key = "memory", signs(view.live or view.snapshot is None)
    if section is not None:
        gauges.pop(-2)
        ranks = [section.head, *section.lines]
        if len(ranks) + 2 > height:  # no room for a heading: the title goes into the rule
            title, key, ranks = section.title, "", section.lines
    blocks = [[*gauge_lines(gauge, width), peak_line(gauge, width)] for gauge in gauges]
    problem = _problem_lines(view, width)
    account = [*problem, *_in_all_lines(view, width)]
    while problem and blocks and 1 + len(ranks) + sum(map(len, blocks)) + len(problem) > height:
        blocks.pop()
    spare = height - 1 - len(ranks) - len(account) - FIGURES
    if ranks:  # beside the ranks, a gauge is shown whole or not at all
        while blocks and sum(map(len, blocks)) > spare:
            blocks.pop()
        account = account if spare >= 0 else []
    with_history = [n for n, gauge in enumerate(gauges[: len(blocks)]) if gauge.history.steps]
    spare -= sum(map(len, blocks))
    rows = min(MOST_ROWS, spare // len(with_history)) if with_history else 0
    if rows >= LEAST_ROWS:
        for n in with_history:
            blocks[n] += history_lines(gauges[n], width, rows)
    lines = [rule(title, width, key)]
    lines += [*ranks, *(line for block in blocks for line in block), *account]
    return lines[:height]


def _problem_lines(view: RunView, width: int) -> list[Line]:
    """Why there is no prediction."""
    if not view.prediction_problem:
        return []
    return missing_lines("prediction", view.prediction_problem, width)


def _in_all_lines(view: RunView, width: int) -> list[Line]:
    """How full the whole device is."""
    lines: list[Line] = []
    run = view.snapshot
    if run is not None and view.devices is not None and view.live:
        wanted = run.facts.started.device_id if run.facts.started else ""
        for one in view.devices.devices:
            used, total, busy = one.used_bytes, one.total_bytes, one.utilization_percent
            if one.id == wanted and isinstance(used, int) and isinstance(total, int) and total:
                note = "" if isinstance(busy, Missing) else f"{number_or_reason(busy, '%')} busy"
                label = "in all" if width < 44 else f"{one.memory_label} in all"
                lines.append(whole_line(label, used, total, width, note))
    return lines


def figure_lines(view: RunView, width: int, height: int) -> list[Line]:
    """Speed, losses and size: one row each."""
    run = view.snapshot
    if run is None:
        return []
    facts = run.facts
    task = task_of(run.plan)
    rows = _speed_rows(view, run, task.units, together=height < FIGURES)
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
    lines = [rule("speed", width)] if height > 3 else []
    lines += [
        [Span(" " + left(name, 16), "dim"), Span(fit(text, width - 17))] for name, text in rows
    ]
    return lines[:height]


def _speed_rows(
    view: RunView, run: RunSnapshot, units: str, *, together: bool
) -> list[tuple[str, str]]:
    """The speed in all, and of each device if there are several; `together`: in one row."""
    words = rate_word(run.units_per_second)
    each = each_per_second(run.plan, run.units_per_second)
    guess = f"  (~{rate_word(view.prediction.tokens_per_second)})" if view.prediction else ""
    if each is None:
        return [(f"{units}/s", words + guess)]
    if together:
        return [(f"{units}/s, each", f"{words} · {rate_word(each)}")]
    return [(f"{units}/s", words + guess), ("  each device", rate_word(each))]


class MemoryGauges(Painted):
    """Shows predicted and measured memory, live."""

    _view: RunView = RunView()

    def show(self, view: RunView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        lines = memory_lines(self._view, width, height)
        room = height - len(lines)
        return lines + (figure_lines(self._view, width, room) if room >= 1 else [])
