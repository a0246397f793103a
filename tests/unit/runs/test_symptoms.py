"""What goes wrong in a run is told from its records, with settings that act on it; a healthy run has no symptom."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from msgspec import structs

from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import ModelChoice, Plan, replace
from memconsole.plan.tasks import task_of
from memconsole.plan.training.recipe import learning_rate
from memconsole.runs.read.shown.snapshot import Symptom
from memconsole.runs.read.shown.symptoms import symptoms_of
from memconsole.runs.read.state.reduce import RunState, reduce
from memconsole.runs.record.log import events
from tests.unit.window_file import window_file

PLAN = replace(Plan(), {"train.warmup_steps": 20})


def step(number: int, loss: float, waited: float = 0.0) -> events.Step:
    return events.Step(
        step=number,
        epoch=1,
        loss=loss,
        learning_rate=1e-3,
        gradient_norm=1.0,
        tokens=number * 10,
        tokens_per_second=100.0,
        step_seconds=0.1,
        data_wait_seconds=waited,
    )


def evaluation(number: int, loss: float, unigram: float = 5.0) -> events.Evaluation:
    return events.Evaluation(
        step=number,
        loss=loss,
        bits_per_byte=None,
        tokens=100,
        seconds=1.0,
        metrics={"unigram_loss": unigram},
    )


def state_of(*records: events.Record) -> RunState:
    state = RunState()
    for record in records:
        reduce(state, record)
    return state


def noisy(last: int, level: float, slope: float = 0.0, waited: float = 0.0) -> list[events.Record]:
    noise = random.Random(1)
    return [step(n, level - slope * n + noise.gauss(0, 0.1), waited) for n in range(1, last + 1)]


def only(found: tuple[Symptom, ...]) -> Symptom:
    (symptom,) = found
    return symptom


def test_a_run_that_learns_has_no_symptom() -> None:
    falling = [step(n, 2 + 4 * math.exp(-n / 60), 0.01) for n in range(1, 400)]
    judged = [evaluation(n, 2.1 + 4 * math.exp(-n / 60)) for n in (100, 200, 300, 399)]
    records = sorted([*falling, *judged], key=lambda record: record.step)
    assert symptoms_of(PLAN, state_of(*records)) == ()
    assert symptoms_of(PLAN, RunState()) == ()


def test_waiting_for_data_is_told_with_its_share() -> None:
    found = only(symptoms_of(PLAN, state_of(*noisy(60, 3.0, waited=0.035))))
    assert found.name == "waits_for_data"
    assert found.words.startswith("35 % of a step")
    assert [one.changes for one in found.helps] == [{"data.streaming": False}]
    assert found.helps[0].options == "--set data.streaming=false"
    assert symptoms_of(PLAN, state_of(*noisy(60, 3.0, waited=0.015))) == ()
    assert symptoms_of(PLAN, state_of(*noisy(10, 3.0, waited=0.09))) == (), "too early to tell"


@pytest.mark.parametrize(
    ("preset", "settings", "offered"),
    [
        ("stories", {}, [{"data.streaming": False}]),
        (
            "stories",
            {"data.cache_gib": 0},
            [{"data.streaming": False}, {"data.cache_gib": 20}],
        ),
        ("stories", {"data.streaming": False}, [{"train.batch_size": 32}]),
        ("gearhead-small", {}, [{"data.streaming": False}]),
        (
            "stories",
            {"data.streaming": False, "data.shuffle_buffer": 100},
            [{"train.batch_size": 32}],
        ),
        ("lqr", {}, [{"train.batch_size": 128}, {"data.shuffle_buffer": 10_000}]),
        ("lqr", {"data.shuffle_buffer": 10_000}, [{"train.batch_size": 128}]),
        ("efficientids", {}, [{"train.batch_size": 32}]),
    ],
)
def test_every_task_that_waits_is_offered_what_acts_on_it(
    preset: str, settings: dict[str, object], offered: list[dict[str, object]]
) -> None:
    plan = replace(catalog.preset(preset), settings)
    found = only(symptoms_of(plan, state_of(*noisy(60, 3.0, waited=0.035))))
    assert [one.changes for one in found.helps] == offered
    for one in found.helps:
        changed = replace(plan, one.changes)
        check(changed)
        assert changed != plan
        assert task_of(plan).not_applicable(plan).keys().isdisjoint(one.changes)


def test_a_task_is_offered_a_longer_buffer_if_the_buffer_applies_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(catalog.preset("efficientids"), {"data.shuffle_buffer": 100})

    def offered() -> bool:
        helps = only(symptoms_of(plan, state_of(*noisy(60, 3.0, waited=0.035)))).helps
        return {"data.shuffle_buffer": 10_000} in [one.changes for one in helps]

    assert not offered()
    streaming = {"data.streaming": "rows are read as they are needed"}
    monkeypatch.setattr(type(task_of(plan)), "not_applicable", lambda self, plan: streaming)
    assert offered()


@pytest.mark.parametrize("model", catalog.models())
def test_every_task_is_offered_something(model: str, tmp_path: Path) -> None:
    """Whatever is offered to any task can be set, and does something there."""
    plan = Plan(model=ModelChoice(name=model))
    task = task_of(plan)
    if task.files:
        source = tmp_path / f"data{task.files[0]}"
        if task.name == "regression":
            window_file(source)
        else:
            source.write_bytes(b"1,2,5,1\n")  # a rating
        plan = replace(plan, {"data.source": str(source), "data.sequence_length": 8})
    found = only(symptoms_of(plan, state_of(*noisy(60, 3.0, waited=0.035))))
    assert found.helps
    for one in found.helps:
        check(replace(plan, one.changes))
        assert task.not_applicable(plan).keys().isdisjoint(one.changes)


def test_a_flat_loss_no_better_than_the_baseline_is_not_learning() -> None:
    flat = noisy(300, 5.1)
    found = only(symptoms_of(PLAN, state_of(*flat, evaluation(300, 5.1))))
    assert found.name == "not_learning"
    assert "5.1000" in found.words
    assert "5.0000" in found.words
    rates = [one.changes["train.learning_rate"] for one in found.helps[:2]]
    assert rates == [pytest.approx(3 * learning_rate(PLAN), rel=0.05),
                     pytest.approx(learning_rate(PLAN) / 3, rel=0.05)]  # fmt: skip
    assert found.helps[2].changes == {"data.shuffle_buffer": 50_000}
    for one in found.helps:
        check(replace(PLAN, one.changes))


def test_a_flat_loss_below_the_baseline_or_a_falling_one_is_none() -> None:
    assert symptoms_of(PLAN, state_of(*noisy(300, 3.0), evaluation(300, 3.0))) == ()
    falling = noisy(300, 6.5, slope=0.005)
    assert symptoms_of(PLAN, state_of(*falling, evaluation(300, 5.1))) == ()
    assert symptoms_of(PLAN, state_of(*noisy(90, 5.1), evaluation(90, 5.1))) == (), "too early"


def test_validation_that_rises_away_from_training_is_overfitting() -> None:
    plan = replace(PLAN, {"data.max_examples": 10, "train.weight_decay": 0.0})
    steps = noisy(500, 2.0)
    judged = [
        evaluation(n, loss)
        for n, loss in ((100, 3.0), (200, 2.9), (300, 3.0), (400, 3.1), (500, 3.3))
    ]
    records = sorted([*steps, *judged], key=lambda record: record.step)
    found = only(symptoms_of(plan, state_of(*records)))
    assert found.name == "overfitting"
    assert "best 2.9000 at step 200" in found.words
    changed = {key for one in found.helps for key in one.changes}
    assert {"train.early_stopping_patience", "data.max_examples", "train.weight_decay"} <= changed
    shorter = [r for r in records if r.step <= 400]
    assert symptoms_of(plan, state_of(*shorter)) == (), "two evaluations are no rise"


@pytest.mark.parametrize(("optimizer", "decay"), [("adamw", 0.1), ("sgd", 0.0005), ("lion", 0.33)])
def test_decay_is_offered_at_the_size_that_suits_the_optimizer(
    optimizer: str, decay: float
) -> None:
    plan = replace(PLAN, {"optimize.optimizer": optimizer, "train.weight_decay": 0.0})
    judged = [evaluation(n, loss) for n, loss in ((100, 2.9), (200, 3.0), (300, 3.1), (400, 3.3))]
    found = only(symptoms_of(plan, state_of(step(1, 2.0), *judged)))
    offered = {key: value for one in found.helps for key, value in one.changes.items()}
    assert offered["train.weight_decay"] == pytest.approx(decay, rel=0.05)
    with_its_own = replace(plan, {"train.weight_decay": None})
    kept = only(symptoms_of(with_its_own, state_of(step(1, 2.0), *judged)))
    assert all("train.weight_decay" not in one.changes for one in kept.helps)


@pytest.mark.parametrize(("last", "rises"), [(2.95, False), (2.96, True)])
def test_a_rise_is_at_least_two_per_cent_above_the_best(last: float, rises: bool) -> None:
    judged = [evaluation(n, loss) for n, loss in ((1, 2.9), (2, 2.92), (3, 2.93), (4, last))]
    assert bool(symptoms_of(PLAN, state_of(step(1, 2.0), *judged))) == rises


@pytest.mark.parametrize(
    ("logged", "measured", "found"), [(3.2, 2.0, True), (2.0, 3.2, False), (2.0, None, True)]
)
def test_overfitting_is_judged_by_the_loss_that_an_evaluation_measured_on_training_rows(
    logged: float, measured: float | None, found: bool
) -> None:
    records: list[events.Record] = []
    for number, loss in ((100, 2.9), (200, 3.0), (300, 3.1), (400, 3.3)):
        judged = structs.replace(evaluation(number, loss), train_loss=measured)
        records += [step(number, logged), judged]
    told = [one.words for one in symptoms_of(PLAN, state_of(*records))]
    assert len(told) == found
    assert all("training loss is 2.0000" in words for words in told)


def test_only_settings_that_the_task_uses_are_offered() -> None:
    waiting = state_of(*noisy(60, 3.0, waited=0.05))
    lqr = replace(PLAN, {"model.name": "lqr", "data.source": "windows.h5"})
    offered = [one.changes for one in only(symptoms_of(PLAN, waiting)).helps]
    assert offered == [{"data.streaming": False}]
    assert only(symptoms_of(lqr, waiting)).helps == ()
