"""Every task is trained by both backends: they sum the same, and padding counts nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks import TASKS, task_of
from memconsole.plan.tasks.preference import PREFERENCES
from memconsole_jax import engine as jax_engine
from memconsole_jax.tasks import TASKS as IN_JAX
from memconsole_torch import engine as torch_engine
from memconsole_torch.tasks import TASKS as IN_TORCH
from memconsole_trainer.engine import Batch, Engine, LossSum
from memconsole_trainer.weights.initialize import InitialWeights

torch.set_num_threads(1)

LENGTH, ROWS, PADDED = 8, 4, 2
CREATE: dict[str, Callable[[Plan, None], Engine]] = {
    "torch": torch_engine.create,
    "jax": jax_engine.create,
}
SMALLEST = {
    entry.task: entry.name
    for entry in sorted(catalog.models().values(), key=lambda e: -(e.parameters or 0))
}
"""A small model of each task; one of no fixed size comes last."""
OBJECTIVE_OF = {task.name: objective for objective, task in PREFERENCES.items()}
SMALLEST |= dict.fromkeys(OBJECTIVE_OF, SMALLEST["language"])


def test_both_backends_train_every_task() -> None:
    for backend, found in (("torch", IN_TORCH), ("jax", IN_JAX)):
        words = f"backends/memconsole_{backend}/tasks/__init__.py: TASKS"
        assert found.keys() == TASKS.keys(), words


def plan_of(task: str, backend: str) -> Plan:
    return replace(
        Plan(),
        {
            "backend": backend,
            "device.name": "cpu",
            "model.name": SMALLEST[task],
            "train.objective": OBJECTIVE_OF.get(task, "next-token"),
            "data.sequence_length": LENGTH,
            "train.batch_size": ROWS,
        },
    )


def batch_of(plan: Plan, rows: int, padding: int) -> Batch:
    """Rows of small numbers, which are valid in every task, and rows of padding after them."""
    draw, arrays = np.random.default_rng(0), {}
    for array in task_of(plan).inputs(plan, catalog.model(plan)):
        size = (1, rows, *array.shape)
        numbers = draw.integers(0, 2, size) if array.dtype == "int32" else draw.random(size)
        fill = np.full((1, padding, *array.shape), array.fill)
        arrays[array.name] = np.concatenate([numbers, fill], axis=1).astype(array.dtype)
    return Batch(arrays, float(rows))


def summed(engine: Engine, batch: Batch) -> list[float]:
    found: LossSum = engine.evaluate([batch])
    return [found.loss, *found.measures]


@pytest.mark.parametrize("task", TASKS)
def test_both_backends_sum_the_same_and_padding_counts_nothing(task: str) -> None:
    sums = {}
    for backend, create in CREATE.items():
        plan = plan_of(task, backend)
        engine, model = create(plan, None), catalog.model(plan)
        engine.build(plan, model, 10, InitialWeights(model, 0))
        whole = summed(engine, batch_of(plan, ROWS, 0))
        assert len(whole) == 1 + TASKS[task].sums(model), f"{backend}: loss, then each measure"
        assert whole[0] > 0
        padded = summed(engine, batch_of(plan, ROWS - PADDED, PADDED))
        fewer = batch_of(plan, ROWS - PADDED, 0)
        assert padded == pytest.approx(summed(engine, fewer), rel=1e-5, abs=1e-6), backend
        sums[backend] = whole
    assert sums["torch"] == pytest.approx(sums["jax"], rel=1e-3, abs=1e-3)
