"""The controller protocol: a controller decides what is done with each batch."""

from __future__ import annotations

from typing import Any, Protocol

from memconsole.plan.plan import Plan
from memconsole_trainer.control.plain import Plain
from memconsole_trainer.engine import Batch, Engine


class Controller(Protocol):
    """Takes the optimizer steps of a run. The loop supplies batches, counts, evaluates and
    saves."""

    phase: str
    """The current phase of the run, as events report it. Each phase has its own memory peak."""

    def step(self, engine: Engine, batch: Batch) -> None:
        """Take one optimizer step with `batch`. Does not wait for the device."""
        ...

    def state(self) -> dict[str, Any]:
        """State to store in a checkpoint, as JSON values; empty if the controller has none."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        ...


def controller_of(plan: Plan) -> Controller:
    """Return the controller that a plan asks for."""
    return Plain()
