"""XLA's memory analysis of a training step that the JAX backend has compiled."""

from __future__ import annotations

from typing import Any


def step_memory(engine: Any) -> Any:
    """Sizes in bytes; if the optimizer's state is on the host, those of the gradients' program."""
    step = engine._train_step
    program = step._fused if hasattr(step, "_fused") else step.backward
    return program.memory_analysis()
