"""What the dialogs of the plan screen may ask of the screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from textual.screen import Screen

from memconsole.plan.plan import Plan
from memconsole.tui.views.plan_view import PlanView

if TYPE_CHECKING:
    from memconsole.memory.estimate import Lookup


class PlanOwner(Protocol):
    """Holds the plan, changes it, and shows dialogs."""

    @property
    def view(self) -> PlanView: ...

    @property
    def lookup(self) -> Lookup | None:
        """Finds known exact numbers, for pricing."""

    def change(self, make: Callable[[Plan], Plan]) -> None:
        """Change the plan and price it, or show why the change is not allowed."""

    def notice(self, words: str, role: str = "accent") -> None:
        """Show a notice above the footer."""

    def open(self, screen: Screen[object], done: Callable[[object], None] | None = None) -> None:
        """Show a dialog; `done` is called with its result."""
