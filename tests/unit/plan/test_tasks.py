"""Every task is registered whole: its model, its catalog entry, its settings and its data."""

from __future__ import annotations

import pytest

from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.models.model import Model
from memconsole.plan.plan import ModelChoice, Plan, PlanError, get, replace
from memconsole.plan.tasks import TASKS, Task, task_for, task_of, task_of_model
from memconsole.plan.tasks.preference import PREFERENCES
from memconsole_trainer.tasks.opening import opener_of


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


def plans_of(task: Task) -> list[Plan]:
    """Plans of the task with every model of the catalog. Language models may also learn preferences."""
    objective = next((o for o, found in PREFERENCES.items() if found is task), None)
    name = task.name if objective is None else "language"
    entries = [entry for entry in catalog.models().values() if entry.task == name]
    plans = [Plan(model=ModelChoice(name=entry.name)) for entry in entries]
    return [replace(plan, {"train.objective": objective or "next-token"}) for plan in plans]


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
        assert task_of(plan) is task_for(plan, model) is task


def test_no_two_tasks_have_the_same_record() -> None:
    tasks = [task for task in TASKS.values() if task not in PREFERENCES.values()]
    records: list[type[Model]] = [task.model_type for task in tasks]
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


@pytest.mark.parametrize("preset", ["lqr", "efficientids"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"data.template": "chatml"}, "is for text"),
        ({"data.tokenizer": "x"}, "is for text"),
        ({"data.split": "foo"}, "is for text"),
        ({"data.held_out": "last"}, "is for text"),
        ({"data.isolate_documents": True}, "leave it out"),
        ({"optimize.fused_loss": True}, "leave it out"),
    ],
)
def test_settings_that_do_nothing_for_a_task_are_refused(
    preset: str, setting: dict[str, object], words: str
) -> None:
    own = catalog.preset(preset)
    check(own)
    (key,) = setting
    with pytest.raises(PlanError, match=words) as error:
        check(replace(own, setting))
    assert error.value.key == key


def test_a_stride_is_refused_where_the_rows_are_given() -> None:
    with pytest.raises(PlanError, match=r"data\.stride = 5: the file holds the windows"):
        check(replace(catalog.preset("lqr"), {"data.stride": 5}))
    check(replace(catalog.preset("efficientids"), {"data.stride": 5}))


@pytest.mark.parametrize("before", sorted(catalog.presets()))
@pytest.mark.parametrize("model", ["lqr", "efficientids"])
def test_choosing_a_model_without_text_drops_what_was_meant_for_text(
    before: str, model: str
) -> None:
    whole = {"optimize.lora_rank": 0, "optimize.freeze_base": False, "data.sequence_length": 32}
    text = {"data.held_out": "last", "optimize.fused_loss": True, "train.dropout": 0.1}
    plan = catalog.choose(replace(catalog.preset(before), whole | text), "model.name", "stories")
    assert (plan.data.held_out, plan.train.dropout) == ("last", 0.1)
    plan = catalog.choose(plan, "model.name", model)
    check(catalog.choose(plan, "data.source", catalog.preset(model).data.source))


def test_a_measure_has_one_key(task: Task) -> None:
    keys = [m.key for m in (task.loss, *task.measures, *task.derived, *task.baselines)]
    assert len(set(keys)) == len(keys)
    assert {judge.key for judge in task.judges} <= set(keys)


def test_the_trainer_finds_the_data_of_a_task_by_its_name(task: Task) -> None:
    assert callable(opener_of(task))
