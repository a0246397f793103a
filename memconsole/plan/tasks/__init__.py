"""The training tasks, and the task of a plan or a model."""

from __future__ import annotations

from memconsole.plan import catalog
from memconsole.plan.models.model import Model
from memconsole.plan.sections import Plan
from memconsole.plan.tasks.language import LANGUAGE
from memconsole.plan.tasks.preference import PREFERENCES
from memconsole.plan.tasks.recommendation import RECOMMENDATION
from memconsole.plan.tasks.regression import REGRESSION
from memconsole.plan.tasks.task import Input, Measure, Task

__all__ = ["TASKS", "Input", "Measure", "Task", "task_for", "task_of", "task_of_model"]

_OF_MODELS: tuple[Task, ...] = (LANGUAGE, REGRESSION, RECOMMENDATION)
TASKS: dict[str, Task] = {task.name: task for task in (*_OF_MODELS, *PREFERENCES.values())}
_BY_MODEL = {task.model_type: task for task in _OF_MODELS}


def task_of(plan: Plan) -> Task:
    """The task of the plan's model. A catalog entry names its task; any other model is a language model."""
    entry = catalog.models().get(plan.model.name)
    return _trained(plan, TASKS[entry.task] if entry is not None else LANGUAGE)


def task_for(plan: Plan, model: Model) -> Task:
    """What `plan` trains `model` to do."""
    return _trained(plan, task_of_model(model))


def task_of_model(model: Model) -> Task:
    """The task that a model is made for: that of a language model is to predict text, however it is trained."""
    return _BY_MODEL[type(model)]


def _trained(plan: Plan, task: Task) -> Task:
    """A language model may also be trained on preferences."""
    return PREFERENCES.get(plan.train.objective, task) if task is LANGUAGE else task
