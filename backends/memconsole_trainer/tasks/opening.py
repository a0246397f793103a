"""Opens the data of a plan's task."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole_trainer.tasks.task import Opener, TaskData, Teller


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> TaskData:
    """Open the data of a run. `known` holds the fingerprints in the checkpoint that it is resumed
    from. Raises `PlanError` and `DataError`."""
    # The module beside this one that has the task's name; a run needs one of them.
    module = import_module(f"memconsole_trainer.tasks.{task_of(plan).name}")
    opener: Opener = module.open_data
    return opener(plan, model, directory, say, known)
