"""The training tasks, and the task of a plan or a model."""

from __future__ import annotations

from memconsole.plan import catalog
from memconsole.plan.models.model import Model
from memconsole.plan.sections import Plan
from memconsole.plan.tasks.language import LANGUAGE
from memconsole.plan.tasks.recommendation import RECOMMENDATION
from memconsole.plan.tasks.regression import REGRESSION
from memconsole.plan.tasks.task import Input, Measure, Task

__all__ = ["TASKS", "Input", "Measure", "Task", "task_of", "task_of_model"]

TASKS: dict[str, Task] = {task.name: task for task in (LANGUAGE, REGRESSION, RECOMMENDATION)}
_BY_MODEL = {task.model_type: task for task in TASKS.values()}


def task_of(plan: Plan) -> Task:
    """The task of the plan's model. A catalog entry names its task; any other model is a language model."""
    entry = catalog.models().get(plan.model.name)
    return TASKS[entry.task] if entry is not None else LANGUAGE


def task_of_model(model: Model) -> Task:
    """The task that a model is made for."""
    return _BY_MODEL[type(model)]
