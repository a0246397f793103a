"""The phases of a training step with their live bytes, as bars."""

from __future__ import annotations

from memconsole.tui.draw.bars import bar
from memconsole.tui.draw.lines import Line, Span, left, right, rule
from memconsole.tui.plan.widgets.memory_table import NUMBER, SHORT_PHASES, amount_word
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.painted import Painted


def phase_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Live bytes of every phase as bars; the peak is marked."""
    if view.estimate is None or height <= 1:
        return []
    table = view.estimate.table
    lines = [rule("phases", width, "outdated" if view.stale else "live bytes")]
    phases = list(table.phases)
    if height - 1 < len(phases):
        # The highest ones, in order of time.
        kept = sorted(phases, key=lambda p: -table.phases[p])[: height - 1]
        phases = [p for p in phases if p in kept]
    room = width - 16 - NUMBER
    for phase in phases:
        size = table.phases[phase]
        peak = phase == table.peak_phase
        role = "dim" if view.stale else "strong" if peak else ""
        lines.append(
            [
                Span((" ▲ " if peak else "   "), "warn"),
                Span(left(SHORT_PHASES.get(phase, phase), 9), role),
                *bar(size, max(1, *table.phases.values()), room, role="warn" if peak else "train"),
                Span(right(amount_word(size, table.phase_tier(phase)), NUMBER + 2), role),
            ]
        )
    return lines[:height]


class PhaseStrip(Painted):
    """Live bytes over one training step."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return phase_lines(self._view, width, height) if self._view else []
