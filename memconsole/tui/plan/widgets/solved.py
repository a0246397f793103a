"""What a search has changed in the plan: every setting, old → new, and what that does."""

from __future__ import annotations

from dataclasses import dataclass

from memconsole.plan.differences import differing
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.tui.draw.lines import Line, Span, left, rule, wrap
from memconsole.tui.widgets.grown import Grown
from memconsole.units import value_word

COLUMN = 38
"""The least cells of one changed setting."""
LABEL = 20
MOST_ROWS = 6
"""The most rows of the text below the settings."""


@dataclass(frozen=True)
class Solution:
    """The result of a search for one plan: the plan to switch to, and what to say about it."""

    given: Plan
    plan: Plan
    words: str
    role: str = "good"

    def changes(self) -> list[tuple[str, str]]:
        """A label, and ``old → new``, for every setting that is not the same; the optimizations first."""
        differences = differing([self.given, self.plan])
        labels = {row.key: row.short for row in OPTIMIZATIONS}
        first = [key for key in labels if key in differences]
        rest = [key for key in differences if key not in labels]
        return [
            (labels.get(key, _words(key)), " → ".join(map(value_word, differences[key])))
            for key in first + rest
        ]


def _words(key: str) -> str:
    """A setting without a label of its own, as in ``freeze base``."""
    return key.rpartition(".")[2].replace("_", " ")


def solved_lines(solution: Solution, undo: str, width: int, height: int) -> list[Line]:
    """A rule, the changed settings in as many columns as there is room for, and the words."""
    changes = solution.changes()
    count = f"{len(changes)} setting{'s' if len(changes) > 1 else ''} changed"
    lines = [rule(count, width, f"{undo} undoes")]
    across = max(1, min(len(changes), width // COLUMN))
    down = -(-len(changes) // across)
    for y in range(down):
        line: Line = []
        for label, values in changes[y::down]:
            cells = width // across - 2
            room = max(LABEL - 1, min(len(label), cells - len(values)))
            line += [
                Span(f" {left(label, room)} "),
                Span(left(values, cells - room), "strong"),
            ]
        lines.append(line)
    lines += [
        [Span(f" {row}", solution.role)] for row in wrap(solution.words, width - 1, MOST_ROWS)
    ]
    return lines[:height]


class Solved(Grown):
    """Hidden while no search has just changed the plan."""

    _solution: Solution | None = None
    _undo = ""

    def show(self, solution: Solution | None, undo: str = "") -> None:
        self._solution, self._undo = solution, undo
        self.display = solution is not None
        self.repaint()

    def lines(self, width: int, height: int) -> list[Line]:
        if self._solution is None:
            return []
        return solved_lines(self._solution, self._undo, width, height)
