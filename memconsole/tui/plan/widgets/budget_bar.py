"""The budget bar: the plan's memory parts on the device's memory, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memconsole.memory.table import MemoryTable
from memconsole.tui.draw.bars import stacked
from memconsole.tui.draw.lines import Line, Span, rule, width_of, wrap
from memconsole.tui.draw.words import VERDICTS
from memconsole.tui.plan.widgets.memory_table import components_of
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


def budget_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """A title with the device, a stacked bar, the verdict and where the limit comes from.

    Pure in `view`.
    """
    if view.problem:
        return [rule("budget", width), [Span(" ✗ not priced", "bad")]][:height]
    if view.estimate is None:
        return [rule("budget", width)]
    table = view.estimate.table
    budget = table.budget
    title = f"{budget.memory_label} {format_bytes(budget.total_bytes)}"
    lines = [rule(title, width, budget.name if width >= 50 else "")]
    parts = [(*_part(name), count) for name, count in components_of(table).items()]
    total = sum(count for _, _, count in parts)
    rest = table.device_bytes - total - table.correction_bytes
    corrected = 1 + table.correction_bytes / max(1, total)
    stack = [(letter, count * corrected, role) for letter, role, count in parts]
    stack.append(("+", float(max(0, rest)), "dim"))
    scale = float(max(budget.usable_bytes, table.device_bytes, 1))
    over = None if table.fits else float(budget.usable_bytes)
    lines.append([Span("▕"), *stacked(stack, scale, width - 2, limit=over), Span("▏")])
    if height >= 6:
        lines.append(_legend(stack, width))
    mark, role = VERDICTS[table.verdict]
    words = f"updating … {table.words}" if view.stale else f"{mark} {table.words}"
    lines += [[Span(f" {t}", "dim" if view.stale else role)] for t in wrap(words, width - 2, 2)]
    if view.cards is not None and not view.stale:
        whole, short = view.cards.words, view.cards.short
        tries = (whole, short, short.partition(", ")[0])
        text = next((words for words in tries if len(words) <= width - 2), short)
        lines += [[Span(f" {t}", "strong")] for t in wrap(text, width - 2, 1 if height < 6 else 2)]
    low, high = table.band_bytes
    room = min(2, max(0, height - len(lines) - (1 if height >= 5 and low < high else 0)))
    sentences = [_usable(table, width - 2, room)]
    if (low, high) != (table.peak_bytes, table.peak_bytes):
        band = f"expected between {format_bytes(low)} and {format_bytes(high)}"
        sentences.append(f"{band} · {table.band_from}" if table.band_from else band)
    for n, sentence in enumerate(sentences):
        room = height - len(lines) - (len(sentences) - 1 - n if height >= 5 else 0)
        lines += [[Span(f" {t}", "dim")] for t in wrap(sentence, width - 2, min(2, max(0, room)))]
    return lines[:height]


def _usable(table: MemoryTable, width: int, rows: int) -> str:
    """The memory that the plan needs, the usable memory, and where that limit comes from; in fewer words if they do not
    fit into `rows` rows of `width` cells."""
    budget = table.budget
    usable, why = format_bytes(budget.usable_bytes), budget.why
    taken = f"{format_bytes(table.device_bytes)} of {usable}"
    short = re.split(r" \(|; ", why)[0].replace("of the ", "of ")
    tries = (
        f"{taken} usable · {why}", f"{taken} · {why}", f"{taken} · {short}", f"of {usable} · {short}", short,
    )  # fmt: skip
    least = short.partition(", less ")[0]
    return next((words for words in tries if len(wrap(words, width, len(words))) <= rows), least)


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


class BudgetBar(Painted):
    """Shows whether the plan fits."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return budget_lines(self._view, width, height) if self._view else []
