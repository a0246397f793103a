"""Opens the data of a plan's task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole_trainer.tasks import language, recommendation, regression
from memconsole_trainer.tasks.task import Opener, TaskData, Teller

OPENERS: dict[str, Opener] = {
    "language": language.open_data,
    "regression": regression.open_data,
    "recommendation": recommendation.open_data,
}
"""The opener of each task, by the task's name."""


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> TaskData:
    """Open the data of a run. `known` holds the fingerprints in the checkpoint that it is resumed
    from. Raises `PlanError` and `DataError`."""
    return OPENERS[task_of(plan).name](plan, model, directory, say, known)
