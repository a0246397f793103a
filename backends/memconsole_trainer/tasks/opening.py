"""Opens the data of a plan's task."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import Task, task_of
from memconsole.plan.tasks.preference import Preference
from memconsole_trainer.tasks.task import Opener, TaskData, Teller


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> TaskData:
    """Open the data of a run. `known` holds the fingerprints in the checkpoint that it is resumed
    from. Raises `PlanError` and `DataError`."""
    return opener_of(task_of(plan))(plan, model, directory, say, known)


def opener_of(task: Task) -> Opener:
    """What opens the data of a task. It is in the module beside this one that has the task's name, or in that of all
    preferences; a run imports one of them."""
    name = "preference" if isinstance(task, Preference) else task.name
    found: Opener = import_module(f"memconsole_trainer.tasks.{name}").open_data
    return found
