"""The controller protocol: a controller decides what is done with each batch."""

from __future__ import annotations

from typing import Any, Protocol

from memconsole.plan.plan import Plan
from memconsole.runs.record.log import events
from memconsole_trainer.control.hybrid import Hybrid
from memconsole_trainer.control.plain import Plain
from memconsole_trainer.engine import Batch, Engine, StepMetrics


class Controller(Protocol):
    """Takes the steps of a run. The loop supplies batches, counts, evaluates and saves."""

    @property
    def phase(self) -> str:
        """The phase of the next step, as events report it. Each phase has its own memory peak."""
        ...

    def prepare(self, engine: Engine) -> None:
        """Make the transition to `phase`, if it has just begun."""
        ...

    def step(self, engine: Engine, batch: Batch) -> bool:
        """Take one step with `batch`. Returns whether the batch was trained on."""
        ...

    def take_metrics(self, engine: Engine) -> list[StepMetrics]:
        """Metrics of every step since the last call."""
        ...

    def take_events(self) -> list[events.Event]:
        """The events to report since the last call."""
        ...

    def state(self) -> dict[str, Any]:
        """State to store in a checkpoint, as JSON values; empty if the controller has none."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        ...


def controller_of(plan: Plan, total_steps: int) -> Controller:
    """Return the controller that a plan asks for."""
    return Hybrid(plan, total_steps) if plan.hybrid.on else Plain()
