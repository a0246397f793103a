"""The JAX part of each task: its loss, evaluation and samples."""

from __future__ import annotations

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_for
from memconsole.plan.tasks.preference import PREFERENCES
from memconsole_jax.tasks.language import LANGUAGE
from memconsole_jax.tasks.preference import PREFERENCE
from memconsole_jax.tasks.recommendation import RECOMMENDATION
from memconsole_jax.tasks.regression import REGRESSION
from memconsole_jax.tasks.task import Task

TASKS: dict[str, Task] = {
    "language": LANGUAGE,
    "regression": REGRESSION,
    "recommendation": RECOMMENDATION,
    **dict.fromkeys((task.name for task in PREFERENCES.values()), PREFERENCE),
}


def of(plan: Plan, model: Model) -> Task:
    """What `plan` trains `model` to do."""
    return TASKS[task_for(plan, model).name]
