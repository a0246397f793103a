"""What a screen may ask of the app it is shown by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from textual.worker import Worker

from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.views.run_view import RunView

if TYPE_CHECKING:
    from memconsole.memory.tracers.exact_book import ExactBook


class Console(Protocol):
    """What outlives a screen: the keys, the newest readings, the watched run, the exact numbers."""

    keys: KeyTable
    readonly: bool
    interval_seconds: float
    """Between two looks at files or devices."""
    devices: Devices | None
    run_id: str
    """The run being watched; "" for none."""
    run_view: RunView
    book: ExactBook | None
    """What is known exactly; None until it is asked for."""

    def open_book(self) -> ExactBook | None:
        """The book of exact numbers, opened when first asked for; None where there is to be none."""

    def set_run_view(self, view: RunView) -> None:
        """Look at the watched run in another way."""

    async def watch_run(self, reference: str) -> None:
        """Follow a run and show it."""

    def forget_run(self, run_id: str) -> None:
        """The run is no more."""

    def launch(self, plan: Plan, name: str | None = None) -> Worker[None]:
        """Start `plan` as a run of its own."""

    def resume(self, run_id: str) -> Worker[None]:
        """Start the next attempt of a run."""

    def request(self, run_id: str, what: str) -> Worker[None]:
        """Ask a run to `stop`, `kill`, `pause` or `continue`."""

    def edit_plan(self, plan: Plan) -> None:
        """Take a plan to the plan screen."""

    def edit_plan_of(self, run_id: str) -> None:
        """Take a run's plan to the plan screen."""

    async def action_show_plan(self) -> None:
        """Back to the plan screen."""
