"""Two plans side by side: what differs, and its effect on memory, verdict and time."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.tui.draw.comparing_plans import PricedPlan, plan_rows
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.text_lines import TextLines


class ComparePlansScreen(ConsoleModal, inherit_bindings=False):
    """Scrolls with the arrows. Enter closes it and switches to the other plan."""

    SCREEN = "plans"
    BINDINGS = bindings("plans")

    def __init__(self, this: PricedPlan, other: PricedPlan) -> None:
        super().__init__()
        self._this, self._other = this, other

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield TextLines(id="text")

    def draw_body(self) -> None:
        rows = plan_rows(self._this, self._other, max(20, min(120, self.size.width - 1)))
        self.part(TextLines, "text").show(rows)

    def title_line(self) -> tuple[str, str]:
        return "plans side by side", ""

    def action_move(self, rows: int) -> None:
        self.part(TextLines, "text").scroll_by(rows)

    def action_accept(self) -> None:
        self.dismiss(self._other.plan)
