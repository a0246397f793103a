"""The torch part of each task: its module, loss and evaluation sums."""

from __future__ import annotations

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan
from memconsole_torch.tasks.language import Language
from memconsole_torch.tasks.recommendation import Recommendation
from memconsole_torch.tasks.regression import Regression
from memconsole_torch.tasks.task import Task


def of(plan: Plan, model: Model) -> Task:
    """The task that `model` is made for, as `plan` trains it."""
    if isinstance(model, Regressor):
        return Regression(model)
    if isinstance(model, Recommender):
        return Recommendation(plan, model)
    assert isinstance(model, Architecture)
    return Language(plan, model)
