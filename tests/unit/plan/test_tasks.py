"""Every task is registered whole: its model, its catalog entry, its settings and its data."""

from __future__ import annotations

from importlib import import_module

import pytest

from memconsole.plan import catalog
from memconsole.plan.models.model import Model
from memconsole.plan.plan import ModelChoice, Plan, PlanError, get, replace
from memconsole.plan.tasks import TASKS, Task, task_of, task_of_model


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


def plans_of(task: Task) -> list[Plan]:
    entries = [entry for entry in catalog.models().values() if entry.task == task.name]
    return [Plan(model=ModelChoice(name=entry.name)) for entry in entries]


def test_every_catalog_model_is_of_a_registered_task() -> None:
    unknown = {entry.name: entry.task for entry in catalog.models().values()}
    unknown = {name: task for name, task in unknown.items() if task not in TASKS}
    assert not unknown, "add the task to TASKS of memconsole/plan/tasks/__init__.py"


def test_every_task_has_a_model_in_the_catalog(task: Task) -> None:
    assert plans_of(task), f"memconsole/plan/catalog/models.toml: no model has task = {task.name}"


def test_the_task_of_a_plan_is_the_task_of_its_model(task: Task) -> None:
    for plan in plans_of(task):
        model = catalog.model(plan)
        assert type(model) is task.model_type, f"{plan.model.name}: a record of its own is needed"
        assert task_of(plan) is task_of_model(model) is task


def test_no_two_tasks_have_the_same_record() -> None:
    records: list[type[Model]] = [task.model_type for task in TASKS.values()]
    assert len(set(records)) == len(records), records


def test_a_model_that_no_task_has_is_not_taken_for_a_language_model() -> None:
    class Unknown:
        layers = max_positions = 1

    with pytest.raises(LookupError):
        task_of_model(Unknown())  # type: ignore[arg-type]


def test_what_does_not_apply_to_a_task_are_settings(task: Task) -> None:
    for key, reason in task.not_applicable(plans_of(task)[0]).items():
        get(Plan(), key)  # raises for a key that is no setting
        assert reason
        assert not reason.endswith("."), "one clause, which others words follow or precede"


@pytest.mark.parametrize("setting", [{"optimize.lora_rank": 8}, {"optimize.freeze_base": True}])
def test_a_frozen_base_is_refused_or_not_trained(task: Task, setting: dict[str, object]) -> None:
    plan = replace(plans_of(task)[0], {"data.source": f"rows{''.join(task.files[:1])}"})
    model, (key,) = catalog.model(plan), setting
    frozen = replace(plan, setting)
    if key in task.not_applicable(plan):
        with pytest.raises(PlanError, match=key):
            task.check(frozen, model)
    else:
        assert len(task.trained(frozen, model)) < len(task.trained(plan, model)), key


def test_a_measure_has_one_key(task: Task) -> None:
    keys = [m.key for m in (task.loss, *task.measures, *task.derived, *task.baselines)]
    assert len(set(keys)) == len(keys)
    assert {judge.key for judge in task.judges} <= set(keys)


def test_the_trainer_finds_the_data_of_a_task_by_its_name(task: Task) -> None:
    assert callable(import_module(f"memconsole_trainer.tasks.{task.name}").open_data)
