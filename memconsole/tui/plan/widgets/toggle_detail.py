"""What the selected optimization does: its values, what each would save, and why one is refused."""

from __future__ import annotations

from memconsole.memory.table import Saving
from memconsole.memory.verdict import Verdict, verdict_of
from memconsole.plan.toggles.optimization import Optimization
from memconsole.plan.toggles.optimizations import BY_KEY
from memconsole.tui.draw.lines import Line, Span, fit, left, right, rule, width_of, wrap
from memconsole.tui.draw.words import VERDICTS, signed_bytes, verdict_mark
from memconsole.tui.plan.widgets.document_lengths import brief, whole
from memconsole.tui.plan.widgets.toggles import NUMBER, saving_span, time_word
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.grown import Grown
from memconsole.units import value_word

MOST_ROWS = 6
"""The most rows of a reason or a description."""


def consequence(saving: Saving) -> str:
    """One sentence: what choosing this value would do; why it cannot be chosen comes first."""
    if saving.saves_bytes > 0:
        text = f"saves {saving.tier} {signed_bytes(saving.saves_bytes)[1:]}"
    elif saving.saves_bytes < 0:
        text = f"costs {saving.tier} {signed_bytes(-saving.saves_bytes)[1:]}"
    else:
        text = "saves nothing"
    factor = time_word(saving)
    if factor:
        text += f", time {factor}"
    if not saving.available:
        return f"not trained here: {saving.reason}" + (f" ({text})" if saving.saves_bytes else "")
    return f"{text}: {saving.reason}" if saving.reason else text


def detail_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """About the selected optimization, in whole sentences as long as there is room: every value with its effect, or
    else the next value alone."""
    row = view.row
    about = _dim(f"{row.help} · costs: {row.costs}", width)
    refusal = _refusal(row.refusal(view.plan, kind=view.kind), width)
    notes = _notes(view, width)
    values = [line for value in row.values(view.plan) for line in _value_lines(view, value, width)]
    lines = [rule(row.label, width, row.key), *about, *refusal, *notes, *values]
    if view.rows or len(lines) > height:
        lines = refusal or [*notes, *_next(view, width)]
        room = height - len(lines)
        lines += about if len(about) <= room else _dim(row.help, width, room)
        if len(lines) < height:
            lines = [rule(row.label, width, row.key), *lines]
    if view.rows:
        lengths = [[], *whole(view.rows, width, height)]
        short = len(lines) + len(lengths) > height
        lines = [brief(view.rows, width), *lines] if short else [*lines, *lengths]
    if height - len(lines) >= 4:
        lines += [[], *best_lines(view, width, height - len(lines) - 1)]
    return _cut(lines, width, height)


def brief_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """The same for little room: notes and what the next press does, or why the present value is refused."""
    refusal = _refusal(view.row.refusal(view.plan, kind=view.kind), width)
    lines = refusal or [*_notes(view, width), *_next(view, width)]
    room = height - len(lines)
    if room > 0:
        lines += [brief(view.rows, width)] if view.rows else _dim(view.row.help, width, room)
    return _cut(lines, width, height)


def _cut(lines: list[Line], width: int, height: int) -> list[Line]:
    """At most `height` lines. If there are more, the last one ends with a sign."""
    if len(lines) <= height or height <= 0:
        return lines[: max(0, height)]
    *first, last = lines[height - 1] or [Span("")]
    ended = fit(last.text, width - width_of(first) - 2).removesuffix("…") + " …"
    return [*lines[: height - 1], [*first, Span(ended, last.role)]]


def _dim(text: str, width: int, most: int = MOST_ROWS) -> list[Line]:
    """The text in at most `most` rows. If it is longer, the last one ends with a sign."""
    return [[Span(f" {row}", "dim")] for row in wrap(text, width - 2, min(most, MOST_ROWS))]


def _refusal(reason: str | None, width: int) -> list[Line]:
    """Why the present value cannot be trained."""
    rows = wrap(f"✗ {reason}", width - 2, MOST_ROWS) if reason else []
    return [[Span(f" {row}", "bad")] for row in rows]


def _notes(view: PlanView, width: int) -> list[Line]:
    """The notes on the present value."""
    if view.estimate is None or view.stale:
        return []
    notes = (note.words for note in view.estimate.notes if note.key == view.row.key)
    return [
        [Span(f" {row}", "warn")]
        for words in notes
        for row in wrap(f"! {words}", width - 2, MOST_ROWS)
    ]


def _next(view: PlanView, width: int) -> list[Line]:
    """What the next key press does."""
    key, saving = view.keys.shown("plan", "toggle"), view.next_saving(view.row)
    words = f"→ {value_word(view.next_value(view.row))}"
    if saving is not None:
        does = consequence(saving)
        words += f": ({does})" if view.stale else f": {does}"
    first, *rest = wrap(f"{key} {words}", max(width - 2, len(key)), MOST_ROWS)
    head = [Span(f" {key}", "key"), Span(first.removeprefix(key))]
    return [head, *([Span(f" {row}")] for row in rest)]


def _choice(row: Optimization, saving: Saving, width: int) -> str:
    """An optimization and its new value, with the short label where the long one leaves no room for it."""
    value = value_word(saving.value)
    whole_label = len(row.label) + len(value) + 4 <= width
    return f"{row.label if whole_label else row.short} → {value}"


def _value_lines(view: PlanView, value: object, width: int) -> list[Line]:
    """A value of the selected optimization with its effect; a reason may take several rows."""
    present = value == view.row.value(view.plan)
    saving = next((s for s in view.savings_of(view.row.key) if s.value == value), None)
    name = left(value_word(value), 13)
    if present:
        return [[Span(" ● ", "accent"), Span(name, "accent"), Span("in this plan", "dim")]]
    if saving is None:
        return [[Span(" ○ ", "dim"), Span(name)]]
    head: Line = [Span(" ○ ", "dim"), Span(name), saving_span(saving, view.stale, NUMBER)]
    head.append(Span(right(time_word(saving), 8), "dim"))
    used = 16 + NUMBER + 8
    if saving.reason and len(saving.reason) + 2 <= width - used:
        return [[*head, Span(f"  {saving.reason}", "dim")]]
    reason = wrap(saving.reason, width - 6, MOST_ROWS) if saving.reason else []
    return [head, *([Span(f"     {row}", "dim")] for row in reason)]


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
        then = verdict_of(
            table.device_bytes - saving.saves_bytes,
            table.at_most_bytes - saving.saves_bytes,
            table.budget.usable_bytes,
        )
        better = not view.stale and table.verdict is not Verdict.FITS and then is not table.verdict
        words, role = (f"{verdict_mark(then)} then", VERDICTS[then][1]) if better else ("", "")
        lines.append(
            [
                Span(f" {left(view.keys.toggle_key(row.key), view.keys.toggle_width)} ", "key"),
                Span(left(_choice(row, saving, width - 37), max(0, width - 37))),
                saving_span(saving, view.stale, NUMBER + 1),
                Span(right(time_word(saving), 8), "dim"),
                Span(right(words, 14), role),
            ]
        )
    if not helpful:
        lines.append([Span(" nothing here saves memory", "dim")])
    return lines


class ToggleDetail(Grown):
    """What the selected optimization does: in a few rows, or with `whole` in all the room there is."""

    _view: PlanView | None = None

    def __init__(self, *, id: str, whole: bool = False) -> None:
        super().__init__(id=id)
        self._whole = whole

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        if self._view is None:
            return []
        draw = detail_lines if self._whole else brief_lines
        return draw(self._view, width, height)
