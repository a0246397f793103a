"""The loss of training rows that stands beside the validation loss is that of the same computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memconsole.plan import catalog
from memconsole.plan.data.made import Size
from memconsole.plan.plan import Plan, replace
from memconsole.plan.toggles.optimizations import BY_KEY
from memconsole.runs.read.report.report import report
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from memconsole_trainer.loop.scalars import scalars
from tests.training.harness import runs
from tests.training.harness.runs import attempt, told
from tests.training.loop.test_regression_runs import write_windows

ONE_STEP: dict[str, Any] = {
    "data.shuffle_buffer": 0,
    "data.validation_fraction": 0.2,
    "train.batch_size": 4,
    "train.max_steps": 1,
    "train.learning_rate": 1e-9,
    "train.warmup_steps": 0,
    "train.preflight": False,
    "train.evaluation_batches": 1,
    "optimize.accumulation_steps": 1,
    "device.name": "cpu",
}
"""One step that hardly moves the weights, on the first rows of the data, which are those evaluated."""


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def of_text(path: Path, text: Path) -> Plan:
    return runs.plan(text)


def of_windows(path: Path, text: Path) -> Plan:
    source = str(write_windows(path / "windows.h5", 400))
    return replace(Plan(), {"model.name": "lqr", "data.sequence_length": 8, "data.source": source})


def of_ratings(path: Path, text: Path) -> Plan:
    out = path / "ratings"
    make(Request("ratings", out, Size(1000, None), 0, {"items": 60, "genres": 5, "history": 16}))
    changes = {"model.items": 60, "model.clusters": 6, "data.sequence_length": 12}
    source = {"data.source": str(out / "ratings.dat")}
    return replace(catalog.preset("efficientids"), changes | source)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_micro_batches_leave_the_rows_of_an_evaluation_as_they_are(
    backend: str, tmp_path: Path, text: Path
) -> None:
    pytest.importorskip(backend)
    whole = replace(runs.plan(text), {**ONE_STEP, "backend": backend})
    found = []
    for plan in (whole, BY_KEY["optimize.accumulation_steps"].apply(whole, 4)):
        run = create_run(plan)
        assert attempt(run) == 0
        found.append(told(run, events.Evaluation)[0])
    assert found[0].tokens == found[1].tokens
    for measure in ("loss", "train_loss"):
        losses = [getattr(evaluation, measure) for evaluation in found]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("backend", "task"),
    [("torch", of_text), ("jax", of_text), ("torch", of_windows), ("torch", of_ratings)],
)
def test_it_is_the_loss_that_a_step_without_dropout_has_on_the_same_rows(
    backend: str, task: Any, tmp_path: Path, text: Path
) -> None:
    pytest.importorskip(backend)
    plan = replace(task(tmp_path, text), {**ONE_STEP, "backend": backend})
    run = create_run(plan)
    assert attempt(run) == 0
    (step,), (evaluation,) = told(run, events.Step), told(run, events.Evaluation)
    assert evaluation.train_loss == pytest.approx(step.loss, rel=1e-5)
    assert evaluation.loss != pytest.approx(step.loss, rel=1e-5), "held-out rows are others"
    assert report(run).evaluations[0].train_loss == evaluation.train_loss
    assert ("validation/train_loss", evaluation.train_loss) in scalars(evaluation, "tokens")[1]
    if (backend, task) == ("torch", of_text):
        dropped = create_run(replace(plan, {"train.dropout": 0.5}))
        assert attempt(dropped) == 0
        assert told(dropped, events.Step)[0].loss != pytest.approx(step.loss, rel=1e-3)
        assert told(dropped, events.Evaluation)[0].train_loss == pytest.approx(step.loss, rel=1e-5)


def test_it_is_not_measured_where_it_is_switched_off(text: Path) -> None:
    run = create_run(replace(runs.plan(text), {**ONE_STEP, "train.evaluation_train_batches": 0}))
    assert attempt(run) == 0
    assert [e.train_loss for e in told(run, events.Evaluation)] == [None]
