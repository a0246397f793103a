"""A row of a comparison, and the rows of the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence

from memconsole.plan.differences import differing
from memconsole.plan.plan import Plan
from memconsole.tui.draw.lines import Line, Span, fit_end, left, right, rule
from memconsole.units import value_word

NAME_CELLS = 24
"""Cells of the first column, which names a row."""


def difference_rows(plans: Sequence[Plan], cells: int, width: int) -> list[Line]:
    """The settings that are not the same in all plans. Of a path that is too long, the end is shown."""
    differences = differing(plans)
    lines = [rule("settings that differ", width, "" if differences else "none")]
    for key, values in differences.items():
        words = [value_word(value) for value in values]
        lines.append(
            compared_row(key, [fit_end(w, cells - 1) if "/" in w else w for w in words], cells)
        )
    return lines


def compared_row(name: str, texts: Sequence[str], cells: int, roles: Sequence[str] = ()) -> Line:
    """A row of this name with one text for each column, `cells` wide. `roles` are the colours of the columns."""
    line: Line = [Span(" " + left(name.rpartition(".")[2], NAME_CELLS), "dim")]
    for n, text in enumerate(texts):
        line.append(Span(right(text, cells - 1) + " ", roles[n] if n < len(roles) else ""))
    return line
