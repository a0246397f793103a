"""The budget bar: the plan's memory parts on the device's memory, the verdict, and the speed."""

from __future__ import annotations

from collections.abc import Sequence

from memconsole.memory.table import MemoryTable, Tier
from memconsole.plan.tasks import task_of
from memconsole.tui.draw.bars import stacked
from memconsole.tui.draw.ink import Line, Span, fit, rule, width_of, wrap
from memconsole.tui.draw.words import duration_word, minutes_word, rate_word, step_word
from memconsole.tui.plan.memory_table import components_of
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_bytes

_PARTS = {
    "weights": ("W", "part-a"),
    "gradients": ("G", "part-b"),
    "optimizer state": ("O", "part-c"),
    "activations": ("A", "part-d"),
    "logits and loss": ("L", "part-a"),
    "workspace": ("S", "part-b"),
    "data": ("D", "part-c"),
    "runtime": ("R", "part-d"),
    "snapshots": ("N", "part-a"),
}


def verdict_words(table: MemoryTable) -> str:
    """``fits, 3.1 GiB free`` or ``does not fit, 1.2 GiB over``."""
    free = table.free_bytes
    if table.fits:
        return f"fits, {format_bytes(free)} free"
    return f"does not fit, {format_bytes(-free)} over"


def budget_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """A title with the device, a stacked bar, the verdict and where the limit comes from.

    Pure in `view`.
    """
    if view.estimate is None:
        lines = [rule("budget", width)]
        lines += [[Span(f" {t}", "bad")] for t in wrap(view.problem, width - 2, height - 1)]
        return lines
    table = view.estimate.table
    budget = table.budget
    title = f"{budget.memory_label} {format_bytes(budget.total_bytes)}"
    lines = [rule(title, width, budget.name if width >= 50 else "")]
    parts = [(*_part(name), count) for name, count in components_of(table).items()]
    rest = table.device_bytes - sum(count for _, _, count in parts)
    stack = [(letter, float(count), role) for letter, role, count in parts]
    stack.append(("+", float(max(0, rest)), "dim"))
    scale = float(max(budget.usable_bytes, table.device_bytes, 1))
    over = None if table.fits else float(budget.usable_bytes)
    lines.append([Span("▕"), *stacked(stack, scale, width - 2, limit=over), Span("▏")])
    if view.problem:
        lines += [[Span(f" {t}", "bad")] for t in wrap(f"✗ {view.problem}", width - 1, height - 2)]
        return lines[:height]
    words, mark = verdict_words(table), "✓ " if table.fits else "✗ "
    role = "dim" if view.stale else "good" if table.fits else "bad"
    text = "updating … " + words if view.stale else mark + words
    lines.append([Span(" " + fit(text, width - 1), role)])
    usable = f"{format_bytes(table.device_bytes)} of {format_bytes(budget.usable_bytes)}"
    lines.append([Span(" " + fit(f"{usable} usable · {budget.why}", width - 1), "dim")])
    low, high = table.band_bytes
    if height >= 5 and (low, high) != (table.peak_bytes, table.peak_bytes):
        band = f"expected between {format_bytes(low)} and {format_bytes(high)}"
        if table.band_from:
            band += f" · {table.band_from}"
        lines.append([Span(" " + fit(band, width - 1), "dim")])
    if height >= 6:
        lines.insert(2, _legend(stack, width))
    return lines[:height]


def _legend(stack: Sequence[tuple[str, float, str]], width: int) -> Line:
    """The letters of the bar, for the parts that are not empty."""
    names = {letter: name for name, (letter, _) in _PARTS.items()} | {"+": "allocator and driver"}
    line: Line = [Span(" ")]
    for letter, count, role in stack:
        words = [Span(letter, role), Span(f" {names.get(letter, '')}  ", "dim")]
        if count > 0 and width_of(line) + width_of(words) <= width + 2:
            line += words
    return line


def _part(name: str) -> tuple[str, str]:
    return _PARTS.get(name, (name[:1].upper() or "?", "dim"))


def speed_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Step time, tokens or other units per second, minutes per epoch. Pure in `view`."""
    if view.estimate is None:
        return [rule("speed", width)]
    found = view.estimate
    role = "dim" if view.stale or view.problem else "strong"
    lines = [rule("speed", width, f"{Tier.FORMULA} estimated")]
    lines.append(
        [
            Span(f" {step_word(found.step_seconds)}", role),
            Span("/step  ", "dim"),
            Span(f"{rate_word(found.tokens_per_second)}", role),
            Span(f" {task_of(view.plan).units}/s", "dim"),
        ]
    )
    if found.epoch_minutes is None:
        lines.append([Span(fit(" epoch: n/a — size not known yet", width), "dim")])
    else:
        epochs = view.plan.train.epochs
        total = found.epoch_minutes * epochs * 60
        if view.plan.train.max_steps:
            total = min(total, view.plan.train.max_steps * found.step_seconds)
        lines.append(
            [
                Span(f" {minutes_word(found.epoch_minutes)}", role),
                Span(" min/epoch  ", "dim"),
                Span(duration_word(total), role),
                Span(" in all", "dim"),
            ]
        )
    return lines[:height]


class BudgetBar(Painted):
    """Shows whether the plan fits."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return budget_lines(self._view, width, height) if self._view else []


class PlannedSpeed(Painted):
    """Shows how long training takes."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return speed_lines(self._view, width, height) if self._view else []
