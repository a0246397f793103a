"""The controller's protocol: it decides what becomes of each batch."""

from __future__ import annotations

from typing import Any, Protocol

from memconsole.plan.plan import Plan
from memconsole_trainer.control.plain import Plain
from memconsole_trainer.engine import Batch, Engine


class Controller(Protocol):
    """Takes the optimizer steps of a run. The loop gives it batches, counts, evaluates and saves."""

    phase: str
    """The phase that the run is in now, as events tell it. Its peak of memory is measured by itself."""

    def step(self, engine: Engine, batch: Batch) -> None:
        """One optimizer step with `batch`, by whatever means. Does not wait for the device."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON values; empty where it remembers nothing."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        ...


def controller_of(plan: Plan) -> Controller:
    """The controller that a plan asks for."""
    return Plain()
