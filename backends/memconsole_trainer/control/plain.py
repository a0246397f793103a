"""Plain training: every batch is one step, a backward pass and an update."""

from __future__ import annotations

from typing import Any

from memconsole_trainer.engine import Batch, Engine


class Plain:
    """Implements `Controller`."""

    phase = "train"

    def step(self, engine: Engine, batch: Batch) -> None:
        engine.train_step(batch)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """There is no state to load."""
