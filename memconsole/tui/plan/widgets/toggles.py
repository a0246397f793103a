"""The list of optimizations: value, what the next key press saves, and why one is refused."""

from __future__ import annotations

from textual import events
from textual.geometry import Size
from textual.message import Message

from memconsole.memory.table import Saving
from memconsole.plan.toggles.optimization import Optimization
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.tui.draw.lines import Line, Span, left, right, rule
from memconsole.tui.draw.words import signed_bytes
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.choice_list import selected, viewport
from memconsole.tui.widgets.painted import Painted
from memconsole.units import value_word

NUMBER = 11
"""Cells of a saving: the tier's mark, a space, the sign and up to eight cells of bytes."""


def saving_span(saving: Saving | None, stale: bool, width: int) -> Span:
    """What a change would do to the peak: ``= −12 MiB`` saves, ``~ +3 MiB`` costs, with its tier in a column.

    A value that cannot be trained here is marked ✗ and has no colour.
    """
    if saving is None:
        return Span(right("", width), "dim")
    text = "—"
    if saving.saves_bytes:
        number = signed_bytes(-saving.saves_bytes)
        mark = str(saving.tier) if saving.available else "✗"
        text = f"{mark} {number.rjust(min(width, NUMBER) - 2)}"
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
    refusal = row.refusal(plan, kind=view.kind)
    on = value if isinstance(value, bool) else not row.size and value != plain
    mark = "✗" if refusal and on else "●" if on else "·" if row.size else "○"
    role = "bad" if refusal and on else "accent" if on else "dim"
    nexts = width >= 61
    word, saved, factor = 10, NUMBER, 7 if width >= 68 else 0
    keys = view.keys.toggle_width
    label = width - 5 - keys - word - saved - factor - (15 if nexts else 0)
    name = row.label if len(row.label) <= label else row.short
    # A long value takes cells that its label does not need.
    more = min(max(0, len(value_word(value)) + 1 - word), max(0, label - len(name)))
    label, word = label - more, word + more
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
        line.append(Span(left(f"→ {value_word(view.next_value(row))}", 15), "dim"))
    line.append(saving_span(saving, view.stale, saved))
    if factor:
        line.append(Span(right(time_word(saving), factor), "dim"))
    return selected(line, width) if current else line


def time_word(saving: Saving | None) -> str:
    if saving is None or abs(saving.time_factor - 1) < 0.005:
        return ""
    return f"×{saving.time_factor:.2f}"


class Toggles(Painted):
    """The list, one row per optimization under a rule."""

    class Clicked(Message):
        """A row was clicked."""

        def __init__(self, row: int) -> None:
            super().__init__()
            self.row = row

    def on_click(self, event: events.Click) -> None:
        row = self._first + event.y - 1
        if event.y > 0 and row < len(OPTIMIZATIONS):
            event.stop()
            self.post_message(self.Clicked(row))

    _view: PlanView | None = None
    _first: int = 0

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(OPTIMIZATIONS) + 1

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
