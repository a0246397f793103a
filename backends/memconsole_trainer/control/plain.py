"""Plain training: every batch is one step, a backward pass and an update."""

from __future__ import annotations

from typing import Any

from memconsole.runs.record.log import events
from memconsole_trainer.engine import Batch, Engine, StepMetrics


class Plain:
    """Implements `Controller`."""

    phase = "train"

    def prepare(self, engine: Engine) -> None:
        """There is one phase."""

    def step(self, engine: Engine, batch: Batch) -> bool:
        """Take one optimizer step. Does not wait for the device."""
        engine.train_step(batch)
        return True

    def take_metrics(self, engine: Engine) -> list[StepMetrics]:
        """Metrics of every step since the last call."""
        return engine.take_metrics()

    def take_events(self) -> list[events.Event]:
        """There is nothing to report."""
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """There is no state to load."""
