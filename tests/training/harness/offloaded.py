"""Plans of a small model to compare with and without offload."""

from __future__ import annotations

from typing import Any

import numpy as np

from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import check_trainable
from tests.training.harness import adapted
from tests.training.harness.adapted import BASE, batch, built

LORA = {"optimize.lora_rank": 4, "optimize.freeze_base": True, "optimize.base_storage": "nf4"}
ROUNDED = {"optimize.precision": "bf16-sr"}
IN_BACKWARD = {"optimize.optimizer_in_backward": True, "train.grad_clip": 0.0}


def plan_with(backend: str, changes: dict[str, Any]) -> Plan:
    plan = plans.replace(Plan(), BASE | {"backend": backend} | changes)
    check_trainable(plan)
    check(plan)
    return plan


def resumes(engine: Any, backend: str, changes: dict[str, Any]) -> None:
    """A step after loading what was stored before it ends in the same state."""
    plan = plan_with(backend, changes)
    before = adapted.State(engine)
    engine.train_step(batch(plan, 7))
    after = adapted.State(engine)
    engine.load_state(before)
    engine.train_step(batch(plan, 7))
    for name, array in adapted.State(engine).tensors.items():
        np.testing.assert_array_equal(array, after.tensor(name), name)


def stepped(
    backend: str, changes: dict[str, Any], steps: int = 5, kind: str = "llama"
) -> tuple[Any, list[float]]:
    """An engine of one of `adapted.MODELS` after some steps, and their losses."""
    plan = plan_with(backend, changes)
    engine = built(plan, kind)
    for step in range(steps):
        engine.train_step(batch(plan, step))
    return engine, [m.loss for m in engine.take_metrics()]
