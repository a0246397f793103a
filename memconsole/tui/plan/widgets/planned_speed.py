"""The estimated speed of training: of a step, of an epoch and of the whole run."""

from __future__ import annotations

import re

from memconsole.memory.table import Estimate
from memconsole.plan.tasks import task_of
from memconsole.tui.draw.lines import Line, Span, fit, rule, width_of
from memconsole.tui.draw.words import duration_word, minutes_word, rate_word, step_word
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.painted import Painted


def speed_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Step time, tokens or other units per second, minutes per epoch. Pure in `view`."""
    priced = view.priced
    if priced is None:
        return [rule("speed", width)]
    role = "dim" if view.stale else "strong"
    note = "outdated" if view.stale else f"{priced.time_tier} {priced.time_from or 'estimated'}"
    lines = [rule("speed", width, note)]
    speed: Line = [
        Span(f" {step_word(priced.step_seconds)}", role),
        Span("/step  ", "dim"),
        Span(f"{rate_word(priced.tokens_per_second)}", role),
    ]
    unit = fit(f" {task_of(view.plan).units}/s", width - width_of(speed))
    lines.append([*speed, Span(unit, "dim")])
    lines.append([Span(f" {_whole_run(priced, width - 1)}", role)])
    return lines[:height]


def _whole_run(priced: Estimate, width: int) -> str:
    """Minutes of an epoch, and the time of the whole run with its start, as far as they are known and have room."""
    whole = priced.run_seconds
    parts = (
        [] if priced.epoch_minutes is None else [f"{minutes_word(priced.epoch_minutes)} min/epoch"]
    )
    parts += [] if whole is None else [f"{duration_word(whole)} in all"]
    if not parts:
        return fit("size of the data not known yet", width)
    words = ", ".join(parts)
    if len(words) > width:  # without the seconds beside minutes
        words = re.sub(r"(\d min) \d\d s", r"\1", words)
    return words if len(words) <= width else fit(parts[-1], width)


class PlannedSpeed(Painted):
    """Shows how long training takes."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return speed_lines(self._view, width, height) if self._view else []
