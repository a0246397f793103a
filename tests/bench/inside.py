"""The trainer's own engine and batches in this process, for benchmarks that look inside a step."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any


class Silent:
    """Takes what the trainer says about its start, and says nothing."""

    def phase(self, phase: str, detail: str = "") -> None:
        """Says nothing."""

    def warning(self, message: str) -> None:
        """Says nothing."""

    def tick(self) -> None:
        """Does nothing."""

    def wait_while_paused(self) -> None:
        """Does nothing."""


def engine_and_batches(plan: Any, steps: int) -> tuple[Any, list[Any]]:
    """A built engine, and as many batches of one micro-batch from the plan's data."""
    from memconsole.plan import catalog
    from memconsole_trainer.data.stream import BatchShape, BatchStream
    from memconsole_trainer.tasks.opening import open_data
    from memconsole_trainer.weights.trained import starting_weights

    model = catalog.model(plan)
    with tempfile.TemporaryDirectory() as folder:
        engine = importlib.import_module(f"memconsole_{plan.backend}.engine").create(plan, None)
        engine.build(plan, model, steps, starting_weights(plan, model))
        rows = open_data(plan, model, Path(folder), Silent(), {}).rows()
        shape = BatchShape(1, plan.train.batch_size, plan.data.sequence_length)
        stream = BatchStream(rows, shape)
        batches = [stream.next().batch for _ in range(steps)]
        stream.close()
    return engine, batches
