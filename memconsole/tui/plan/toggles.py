"""The list of optimizations: value, what the next key press saves, and why one is refused."""

from __future__ import annotations

from memconsole.memory.table import Saving
from memconsole.plan.optimization import Optimization
from memconsole.plan.optimizations import BY_KEY, OPTIMIZATIONS
from memconsole.tui.draw.ink import Line, Span, fit, left, right, rule, wrap
from memconsole.tui.draw.words import signed_bytes
from memconsole.tui.plan.document_lengths import brief, whole
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.choice_list import selected, viewport
from memconsole.tui.widgets.painted import Painted
from memconsole.units import value_word

NUMBER = 10
"""Cells of a saving: the tier's mark, the sign and up to eight cells of bytes."""


def saving_span(saving: Saving | None, stale: bool, width: int) -> Span:
    """What a change would do to the peak: ``=−12 MiB`` saves, ``~+3 MiB`` costs, with its tier.

    A value that cannot be trained here is marked ✗ and has no colour.
    """
    if saving is None:
        return Span(right("", width), "dim")
    text = "—"
    if saving.saves_bytes:
        number = signed_bytes(-saving.saves_bytes)
        text = (str(saving.tier) if saving.available else "✗") + number.rjust(
            min(width, NUMBER) - 1
        )
    if not saving.available:
        return Span(right(text, width), "dim")
    if stale:
        text = text if text == "—" else signed_bytes(-saving.saves_bytes)
        return Span(right(f"({text})", width), "dim")
    role = "good" if saving.saves_bytes > 0 else "warn" if saving.saves_bytes < 0 else "dim"
    return Span(right(text, width), role)


def toggle_line(view: PlanView, row: Optimization, width: int, current: bool) -> Line:
    """One row of the list."""
    plan = view.plan
    value, plain = row.value(plan), row.values(plan)[0]
    refusal = row.refusal(plan)
    on = value if isinstance(value, bool) else not row.size and value != plain
    mark = "✗" if refusal and on else "●" if on else "·" if row.size else "○"
    role = "bad" if refusal and on else "accent" if on else "dim"
    nexts = width >= 58
    word, saved, factor = 10, 10, 7 if width >= 66 else 0
    keys = view.keys.toggle_width
    label = width - 5 - keys - word - saved - factor - (13 if nexts else 0)
    name = row.label if len(row.label) <= label else row.short
    saving = view.next_saving(row)
    line = [
        Span("›" if current else " ", "accent"),
        Span(left(view.keys.toggle_key(row.key), keys) + " ", "key"),
        Span(mark, role),
        Span("*" if row.key in view.pinned else " ", "warn"),
        Span(left(name, max(0, label)) + " ", "strong" if current else ""),
        Span(left(value_word(value), word), role if on else ""),
    ]
    if nexts:
        line.append(Span(left(f"→ {value_word(row.next_value(plan))}", 13), "dim"))
    line.append(saving_span(saving, view.stale, saved))
    if factor:
        line.append(Span(right(_time_word(saving), factor), "dim"))
    return selected(line, width) if current else line


def _time_word(saving: Saving | None) -> str:
    if saving is None or abs(saving.time_factor - 1) < 0.005:
        return ""
    return f"×{saving.time_factor:.2f}"


def consequence(view: PlanView, row: Optimization, saving: Saving) -> str:
    """One sentence: what choosing this value would do."""
    if saving.saves_bytes > 0:
        text = f"saves {saving.tier}{signed_bytes(saving.saves_bytes)[1:]}"
    elif saving.saves_bytes < 0:
        text = f"costs {saving.tier}{signed_bytes(-saving.saves_bytes)[1:]}"
    else:
        text = "saves nothing"
    factor = _time_word(saving)
    if factor:
        text += f", time {factor}"
    return f"{text}: {saving.reason}" if saving.reason else text


def detail_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """About the selected optimization: next value and help; with room, each value's effect."""
    row = view.row
    plan = view.plan
    lines: list[Line] = []
    refusal = row.refusal(plan)
    saving = view.next_saving(row)
    key = view.keys.shown("plan", "toggle")
    if refusal:
        first: Line = [Span(" ✗ ", "bad"), Span(fit(refusal, width - 3), "bad")]
    elif saving is None:
        wanted = value_word(row.next_value(plan))
        first = [Span(f" {key} ", "key"), Span(fit(f"→ {wanted}", width - len(key) - 2), "dim")]
    else:
        words = f"→ {value_word(saving.value)}: {consequence(view, row, saving)}"
        mark = "" if saving.available else " (not trained here)"
        first = [Span(f" {key} ", "key"), Span(fit(words + mark, width - len(key) - 2))]
    about = f"{row.help} · costs: {row.costs}"
    if height <= 2:
        second = brief(view.rows, width) if view.rows else [Span(fit(f" {row.help}", width), "dim")]
        return [first, second][:height]
    if height <= 4:
        lines = [rule(row.label, width), first]
        lines += [brief(view.rows, width)] if view.rows else []
        lines += [[Span(f" {t}", "dim")] for t in wrap(about, width - 2, height - len(lines))]
        return lines[:height]
    lines.append(rule(row.label, width, row.key))
    lines += [[Span(f" {t}", "dim")] for t in wrap(about, width - 2, 2)]
    if refusal:
        lines.append(first)
    for value in row.values(plan):
        lines.append(_value_line(view, row, value, width))
    if view.rows and height - len(lines) >= 3:
        lines += [[], *whole(view.rows, width, height - len(lines) - 1)]
    if height - len(lines) >= 4:
        lines.append([])
        lines += best_lines(view, width, height - len(lines))
    return lines[:height]


def best_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """The single changes that save most, and for each whether it alone makes the plan fit."""
    if view.estimate is None:
        return []
    table = view.estimate.table
    helpful = [s for s in view.estimate.savings if s.saves_bytes > 0 and s.available]
    helpful.sort(key=lambda s: -s.saves_bytes)
    lines = [rule("single changes that save most", width)]
    for saving in helpful[: height - 1]:
        row = BY_KEY[saving.key]
        fits = not table.fits and saving.saves_bytes + table.free_bytes >= 0
        words = "✓ fits then" if fits else ""
        lines.append(
            [
                Span(f" {left(view.keys.toggle_key(row.key), view.keys.toggle_width)} ", "key"),
                Span(left(f"{row.label} → {value_word(saving.value)}", max(0, width - 36))),
                saving_span(saving, view.stale, 11),
                Span(right(_time_word(saving), 8), "dim"),
                Span(right(words, 14), "good"),
            ]
        )
    if not helpful:
        lines.append([Span(" nothing here saves memory", "dim")])
    return lines


def _value_line(view: PlanView, row: Optimization, value: object, width: int) -> Line:
    present = value == row.value(view.plan)
    found = next((s for s in view.savings_of(row.key) if s.value == value), None)
    name = left(value_word(value), 13)
    if present:
        return [Span(" ● ", "accent"), Span(name, "accent"), Span("in this plan", "dim")]
    if found is None:
        return [Span(" ○ ", "dim"), Span(name)]
    words = _time_word(found) + (f"  {found.reason}" if found.reason else "")
    return [
        Span(" ○ ", "dim"),
        Span(name),
        saving_span(found, view.stale, 10),
        Span(" " + fit(words.strip(), width - 28), "dim"),
    ]


class Toggles(Painted):
    """The list, one row per optimization under a rule."""

    _view: PlanView | None = None
    _first: int = 0

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._view is None:
            return []
        count, room = len(OPTIMIZATIONS), max(0, height - 1)
        self._first = viewport(self._view.cursor, count, room, self._first)
        shown = range(self._first, min(count, self._first + room))
        more = f"{self._first + 1}–{shown.stop} of {count}" if room < count else "next press saves"
        lines = [rule("optimizations", width, more)]
        lines += [
            toggle_line(self._view, OPTIMIZATIONS[n], width, n == self._view.cursor) for n in shown
        ]
        return lines


class ToggleDetail(Painted):
    """What the selected optimization does."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return detail_lines(self._view, width, height) if self._view else []
