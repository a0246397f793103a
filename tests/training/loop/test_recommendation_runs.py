"""Whole runs of the recommendation task with the real engines, on ratings that `data make` wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from memconsole.cli.from_run import plan_from
from memconsole.plan import catalog, plan_file
from memconsole.plan.data.made import Size
from memconsole.plan.models.recommender import ITEMS_JSON
from memconsole.plan.plan import Plan, replace
from memconsole.plan.training.trained import frozen_names
from memconsole.runs.read.report.report import BestLine, report
from memconsole.runs.record.checkpoints import borrowed
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from tests.training.harness.runs import attempt, state_hashes, told

BACKENDS = ("torch", "jax")
TINY: dict[str, Any] = {
    "model.items": 60,
    "model.clusters": 6,
    "data.sequence_length": 12,
    "train.epochs": 6,
    "train.batch_size": 8,
    "train.warmup_steps": 10,
    "train.learning_rate": 3e-3,
    "train.preflight": False,
    "optimize.accumulation_steps": 2,
    "optimize.freeze_base": True,
    "device.name": "cpu",
}


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "ratings"
    options = {"items": 60, "genres": 5, "history": 16}
    make(Request("ratings", out, Size(4000, None), 0, options))
    return out / "ratings.dat"


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan(path: Path, backend: str, **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    found = {**TINY, "backend": backend, "data.source": str(path), **settings}
    return replace(catalog.preset("efficientids"), found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_run_ends_bitwise_where_an_uninterrupted_one_ends(
    backend: str, ratings: Path
) -> None:
    pytest.importorskip(backend)
    made = plan(ratings, backend, train__max_steps=14)
    whole, broken = create_run(made), create_run(made)
    assert attempt(whole) == 0
    assert attempt(broken, lambda phase, step: step >= 7) == 75
    assert attempt(broken) == 0
    assert state_hashes(broken) == state_hashes(whole)
    last, expected = told(broken, events.Evaluation)[-1], told(whole, events.Evaluation)[-1]
    assert (last.loss, last.metrics) == (expected.loss, expected.metrics)
    assert last.train_loss == expected.train_loss is not None
    shown = report(whole)
    assert shown.evaluations[-1].metrics == expected.metrics
    assert (shown.task, shown.unit) == ("recommendation", "interaction")
    best = max(
        told(whole, events.Evaluation), key=lambda e: (e.metrics["ndcg_at_10"], -(e.loss or 0))
    )
    assert shown.best == BestLine(
        measure="ndcg_at_10", value=best.metrics["ndcg_at_10"], step=best.step
    )
    assert (whole.checkpoints_path / "best").resolve().name == f"step-{best.step:09d}"
    build = [p for p in told(whole, events.Phase) if p.parameters is not None][-1]
    model = catalog.model(made)
    frozen = set(frozen_names(made, model))
    trained = sum(p.size for p in model.parameters() if p.name not in frozen)
    assert build.parameters == sum(p.size for p in model.parameters())
    assert build.trainable_parameters == trained


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_beats_its_baselines(backend: str, ratings: Path) -> None:
    pytest.importorskip(backend)
    run = create_run(plan(ratings, backend))
    assert attempt(run) == 0
    last = told(run, events.Evaluation)[-1]
    found = last.metrics
    assert last.loss < found["popularity_loss"] - 0.3
    assert found["recall_at_10"] > found["knn_recall_at_10"] > found["popularity_recall_at_10"]
    assert found["mrr_at_10"] > found["popularity_mrr_at_10"]
    assert found["recall_at_1"] == found["mrr_at_1"] == found["ndcg_at_1"]
    assert found["mrr_at_10"] < found["ndcg_at_10"] < found["recall_at_10"]


@pytest.mark.slow
def test_both_backends_come_to_the_same_measures(ratings: Path) -> None:
    found = []
    for backend in BACKENDS:
        pytest.importorskip(backend)
        run = create_run(plan(ratings, backend, train__epochs=2))
        assert attempt(run) == 0
        last = told(run, events.Evaluation)[-1]
        found.append({"loss": last.loss, **last.metrics})
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def test_ratings_that_changed_since_the_run_began_are_refused(
    ratings: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ratings.dat"
    path.write_bytes(ratings.read_bytes())
    run = create_run(plan(path, "torch", model__items=61))
    assert attempt(run, lambda phase, step: step >= 2) == 75
    for line, message in (
        ("1::1::5::2000000000\n", "the data has changed since step-"),
        ("1::999::5::2000000000\n", f"{path}: item 999 was not there when this run began"),
    ):
        path.write_bytes(ratings.read_bytes() + line.encode())
        assert attempt(run) != 0
        assert message in told(run, events.Error)[-1].message


def test_a_run_from_anothers_weights_knows_its_items_after_the_ratings_have_grown(
    ratings: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ratings.dat"
    path.write_bytes(ratings.read_bytes())
    first = create_run(plan(path, "torch", model__items=66, train__max_steps=1))
    assert attempt(first) == 0
    path.write_bytes(
        ratings.read_bytes() + b"".join(b"1::%d::5::%d\n" % (n, 2 * 10**9 + n) for n in (98, 99))
    )
    wanted = plan_from(first.id)
    second = create_run(wanted)
    second.plan_path.write_text(plan_file.dumps(borrowed.keep(second, wanted), full=True))
    items = json.loads((first.path / ITEMS_JSON).read_bytes())["numbers"]
    shutil.rmtree(first.path)  # its frozen weights and its items are kept in the second run
    assert attempt(second) == 0, told(second, events.Error)
    found = json.loads((second.path / ITEMS_JSON).read_bytes())["numbers"]
    assert all(own == item for own, item in zip(found, items, strict=True) if item >= 0)
    assert [own for own, item in zip(found, items, strict=True) if own != item] == [98, 99]


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("1::2::3\n", {}, "{path}: line 1: has 3 fields, expected 4: 1::2::3"),
        ("1::2::3::4\n5::6::7::8\n", {}, "{path}: no user has two interactions to train on"),
        ("".join(f"1::{i}::3::4\n" for i in range(9)), {"model__items": 8}, "{path} holds 9 items"),
    ],
    ids=("malformed", "too short", "too many items"),
)
def test_data_that_cannot_be_used_end_the_run_with_one_sentence(
    text: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "ratings.dat"
    path.write_text(text)
    run = create_run(plan(path, "torch", **changes))
    assert attempt(run) != 0
    (error,) = told(run, events.Error)
    assert message.format(path=path) in error.message
    assert str(path) in error.message
