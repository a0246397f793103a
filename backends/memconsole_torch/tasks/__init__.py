"""The torch part of each task: its module, loss and evaluation sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_for
from memconsole.plan.tasks.preference import PREFERENCES
from memconsole_torch.tasks.language import Language
from memconsole_torch.tasks.preference import Preference
from memconsole_torch.tasks.recommendation import Recommendation
from memconsole_torch.tasks.regression import Regression
from memconsole_torch.tasks.task import Task

TASKS: dict[str, Callable[[Plan, Any], Task]] = {
    "language": Language,
    "regression": Regression,
    "recommendation": Recommendation,
    **dict.fromkeys((task.name for task in PREFERENCES.values()), Preference),
}


def of(plan: Plan, model: Model) -> Task:
    """What `plan` trains `model` to do."""
    return TASKS[task_for(plan, model).name](plan, model)
