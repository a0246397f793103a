"""The JAX part of each task: its loss, evaluation and samples."""

from __future__ import annotations

from memconsole.plan.models.model import Model
from memconsole.plan.tasks import task_of_model
from memconsole_jax.tasks.language import LANGUAGE
from memconsole_jax.tasks.recommendation import RECOMMENDATION
from memconsole_jax.tasks.regression import REGRESSION
from memconsole_jax.tasks.task import Task

TASKS: dict[str, Task] = {
    "language": LANGUAGE,
    "regression": REGRESSION,
    "recommendation": RECOMMENDATION,
}


def of(model: Model) -> Task:
    """The task that a model is made for."""
    return TASKS[task_of_model(model).name]
