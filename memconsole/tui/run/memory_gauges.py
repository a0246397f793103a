"""The right of the run screen: memory gauges, predicted and measured, and the run's other figures below them."""

from __future__ import annotations

from collections.abc import Sequence

from memconsole.devices.reading import Missing
from memconsole.tui.draw.gauges import (
    Gauge,
    gauge_lines,
    history_lines,
    missing_lines,
    peak_line,
    signs,
    whole_line,
)
from memconsole.tui.draw.lines import Line, rule
from memconsole.tui.draw.words import number_or_reason
from memconsole.tui.run.figure_rows import FIGURES, figure_lines
from memconsole.tui.run.rank_gauges import rank_section
from memconsole.tui.run.run_gauges import run_gauges
from memconsole.tui.views.run_view import RunView
from memconsole.tui.widgets.painted import Painted

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
        gauges.pop(-2)  # the ranks stand in place of the first process's tensors
        ranks = [section.head, *section.lines]
        if len(ranks) + 2 > height:  # no room for a heading: the title goes into the rule
            title, key, ranks = section.title, "", section.lines
    blocks = [[*gauge_lines(gauge, width), peak_line(gauge, width)] for gauge in gauges]
    problem = _problem_lines(view, width)
    below = [*problem, *_in_all_lines(view, width)]
    while problem and blocks and 1 + len(ranks) + _rows(blocks) + len(problem) > height:
        blocks.pop()
    spare = height - 1 - len(ranks) - len(below) - FIGURES
    if ranks:  # beside the ranks, a gauge is shown whole or not at all
        while blocks and _rows(blocks) > spare:
            blocks.pop()
        below = below if spare >= 0 else []
    blocks = _with_histories(blocks, gauges, width, spare - _rows(blocks))
    lines = [rule(title, width, key)]
    lines += [*ranks, *(line for block in blocks for line in block), *below]
    return lines[:height]


def _rows(blocks: Sequence[Sequence[Line]]) -> int:
    return sum(map(len, blocks))


def _with_histories(
    blocks: list[list[Line]], gauges: Sequence[Gauge], width: int, spare: int
) -> list[list[Line]]:
    """The blocks of the first gauges, each with its history if `spare` rows are enough for those of all."""
    shown = list(zip(blocks, gauges, strict=False))
    count = sum(bool(gauge.history.steps) for _, gauge in shown)
    rows = min(MOST_ROWS, spare // count) if count else 0
    if rows < LEAST_ROWS:
        return blocks
    return [
        [*block, *(history_lines(gauge, width, rows) if gauge.history.steps else [])]
        for block, gauge in shown
    ]


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
        for device in view.devices.devices:
            used, total, busy = device.used_bytes, device.total_bytes, device.utilization_percent
            if device.id == wanted and isinstance(used, int) and isinstance(total, int) and total:
                note = "" if isinstance(busy, Missing) else f"{number_or_reason(busy, '%')} busy"
                label = "in all" if width < 44 else f"{device.memory_label} in all"
                lines.append(whole_line(label, used, total, width, note))
    return lines


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
