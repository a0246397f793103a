"""What a screen may ask of the app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from textual.worker import Worker

from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.views.run_view import RunView

if TYPE_CHECKING:
    from memconsole.memory.tracers.exact_book import ExactBook
    from memconsole.runs.record.directory import RunDirectory
    from memconsole.runs.record.requests import Order


class Console(Protocol):
    """State that outlives a screen: keys, newest readings, the watched run, exact numbers."""

    keys: KeyTable
    readonly: bool
    leaving: bool
    """Whether the console closes; no action is available then."""
    interval_seconds: float
    """Seconds between two checks of files or devices."""
    devices: Devices | None
    run_id: str
    """The watched run; "" for none."""
    came_from: list[str]
    """The main screens that were left, the last one at the end."""
    run_view: RunView
    book: ExactBook | None
    """Exact numbers; None until they are first requested."""

    def open_book(self) -> ExactBook | None:
        """The book of exact numbers, opened on the first call; None if there is to be none."""

    def set_run_view(self, view: RunView) -> None:
        """Change how the watched run is shown."""

    async def watch_run(self, reference: str) -> None:
        """Follow a run and show it."""

    def forget_run(self, run_id: str) -> None:
        """Clear the watched run, if it is this one; its files were deleted."""

    def launch(
        self, plan: Plan, name: str | None = None, after: RunDirectory | None = None
    ) -> Worker[None]:
        """Start `plan` as a new run."""

    def resume(self, run_id: str) -> Worker[None]:
        """Start the next attempt of a run."""

    def request(self, run_id: str, what: Order) -> Worker[None]:
        """Send a run an order."""

    def edit_plan(self, plan: Plan) -> None:
        """Open a plan in the plan screen."""

    def edit_plan_of(self, run_id: str) -> None:
        """Open a run's plan in the plan screen."""

    async def action_show_plan(self) -> None:
        """Back to the plan screen."""

    async def action_go_back(self) -> None:
        """Back to the main screen that was left last."""
