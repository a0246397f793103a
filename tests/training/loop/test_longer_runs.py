"""Runs go on with other lengths and rates, keep their best checkpoint, and lend it to new runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from memconsole.cli.from_run import plan_from
from memconsole.plan import catalog, plan_file
from memconsole.plan import plan as plans
from memconsole.plan.check import check, check_start
from memconsole.plan.models import tokenizer_config
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.training import recipe, resuming
from memconsole.plan.training.origin import origin, shortly
from memconsole.runs.act.launch import resume
from memconsole.runs.record.checkpoints import borrowed
from memconsole.runs.record.checkpoints.manifest import MANIFEST, step_of
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.loop.fingerprint import fingerprint
from memconsole_trainer.loop.progress import Progress, stretch
from memconsole_trainer.weights import trained
from tests.training.harness.runs import attempt, final, plan, state_hashes, told

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that gets worse after its best step, and saves every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        wild = {
            "train__learning_rate": 1.0,
            "train__warmup_steps": 4,
            "train__schedule": "constant",
            "train__grad_clip": 0.0,
            "train__max_steps": 8,
            "train__evaluate_every": 2,
            "train__evaluation_batches": 1,
            "train__checkpoint_every": 100,
            "train__checkpoint_minutes": 0.0,
            "train__keep_checkpoints": 1,
            "train__log_every": 1,
            "train__preflight": False,
        }
        run = create_run(plan(text, **wild))
        assert attempt(run) == 0, final(run)
    return run


def best_step(run: RunDirectory) -> int:
    found = told(run, events.Evaluation)
    return int(min(found, key=lambda one: one.loss).step)


def test_the_best_checkpoint_is_kept_marked_and_taken(finished: RunDirectory) -> None:
    best = best_step(finished)
    assert best < 8
    kept = [step_of(path) for path in finished.committed_checkpoints()]
    assert kept == [best, 8]
    assert (finished.checkpoints_path / "best").resolve().name == f"step-{best:09d}"
    assert trained.read(finished.path, trained.BEST_OR_LAST).checkpoint.step == best
    assert trained.read(finished.path).checkpoint.step == 8


def test_a_crash_costs_no_more_than_the_minutes_allowed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    settings = {"train__max_steps": 4, "train__checkpoint_every": 100, "train__preflight": False}
    run = create_run(plan(text, train__checkpoint_minutes=1e-9, **settings))
    assert attempt(run) == 0, final(run)
    assert {e.step for e in told(run, events.Checkpoint)} == {1, 2, 3, 4}


def test_a_finished_run_goes_on_with_more_steps_at_another_rate(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = create_run(plan(text, train__max_steps=3, train__log_every=1, train__preflight=False))
    assert attempt(run) == 0, final(run)
    with pytest.raises(
        RunError, match=r"is finished; to train it longer: memconsole resume \S+ --set"
    ):
        resume(run)
    wanted: dict[str, object] = {"train.max_steps": 5, "train.learning_rate": 1e-4}
    after = resuming.changed(run.read_plan(), wanted)
    assert resuming.words(run.read_plan(), after) == (
        "train.learning_rate 0.003 → 0.0001, train.max_steps 3 → 5"
    )
    as_older_versions(run)
    run.first_plan_path.write_bytes(run.plan_path.read_bytes())
    run.plan_path.write_text(plan_file.dumps(after, full=True))
    assert attempt(run) == 0, final(run)
    steps = told(run, events.Step)
    assert [e.step for e in steps] == [1, 2, 3, 4, 5]
    assert steps[3].learning_rate <= 1e-4 < steps[1].learning_rate
    assert told(run, events.Started)[-1].resumed_step == 3
    assert told(run, events.Phase)[-1].total_steps in (None, 5)
    run.plan_path.write_text(plan_file.dumps(replace(after, {"train.batch_size": 2}), full=True))
    assert attempt(run) != 0
    assert "was made with other settings" in told(run, events.Error)[-1].message


def as_older_versions(
    run: RunDirectory, free: frozenset[str] = resuming.ELSEWHERE, as_it_is: bool = True
) -> None:
    """Give the newest checkpoint the fingerprint of an older version, in which only the `free` settings could change: by
    default one in which a resumed run kept its length and rate."""
    path, own = run.committed_checkpoints()[-1], run.read_plan()
    state, manifest = (json.loads((path / name).read_text()) for name in ("state.json", MANIFEST))
    model = catalog.model(own)
    state["fingerprints"]["plan"] = fingerprint(own, model, free, as_it_is=as_it_is)
    written = json.dumps(state).encode()
    (path / "state.json").write_bytes(written)
    told = {"size": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    manifest["files"]["state.json"] = told
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("as_it_is", [True, False])
def test_a_checkpoint_that_counts_the_answered_records_is_resumed(
    as_it_is: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    given = plan(text, train__answered_records=3, train__max_steps=2, train__preflight=False)
    run = create_run(given)
    assert attempt(run, lambda phase, step: step == 1) == 75
    as_older_versions(run, resuming.CHANGEABLE - resuming.LATER, as_it_is)
    run.first_plan_path.write_bytes(run.plan_path.read_bytes())
    run.write_plan(resuming.changed(run.read_plan(), {"train.answered_records": 5}))
    assert attempt(run) == 0, final(run)
    assert told(run, events.Started)[-1].resumed_step == 1


def test_more_epochs_lengthen_the_schedule_from_where_the_run_is() -> None:
    told_length = Progress(total_steps=20, steps_per_epoch=10, wanted=(None, 2), step=21, epoch=3,
                           epoch_first_step=21)  # fmt: skip
    same = replace(Plan(), {"train.epochs": 2})
    stretch(told_length, same)
    assert told_length.total_steps == 20
    stretch(told_length, replace(same, {"train.epochs": 4}))
    assert told_length.total_steps == 41
    stretch(told_length, replace(same, {"train.max_steps": 30}))
    assert told_length.total_steps == 30


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("train.batch_size", 2, "--from RUN"),
        ("data.sequence_length", 8, "--from RUN"),
        ("train.seed", 1, "--from RUN"),
        ("train.ema_decay", 0.5, "--from RUN"),
        ("model.layers", 2, "--plan RUN/plan.toml"),
        ("data.vocab_size", 500, "--plan RUN/plan.toml"),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused(key: str, value: Any, instead: str) -> None:
    with pytest.raises(
        PlanError, match=rf"{key} = {value}: a resumed run keeps its .* {instead}"
    ) as no:
        resuming.changed(Plan(), {key: value})
    assert f"{resuming.MAY_CHANGE} may change" in str(no.value)
    assert len(str(no.value)) < 350
    assert resuming.changed(Plan(), {key: plans.get(Plan(), key)}) == Plan()


@pytest.mark.parametrize(
    ("key", "value"),
    [("train.answered_records", 7), ("train.sample_tokens", 3), ("data.cache_gib", 0)],
)
def test_what_changes_no_trained_weight_may_change(key: str, value: Any) -> None:
    after = resuming.changed(Plan(), {key: value})
    assert plans.get(after, key) == value
    assert key in resuming.words(Plan(), after)
    model = catalog.model(Plan())
    assert fingerprint(after, model) == fingerprint(Plan(), model)


def test_a_new_run_has_the_size_of_the_run_whose_weights_it_takes(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the run's tokenizer has fewer entries than its model, whose size follows from the vocabulary."""
    monkeypatch.setenv("XDG_STATE_HOME", str(finished.path.parents[2]))
    open_plan = replace(finished.read_given_plan(), {"data.vocab_size": None})
    monkeypatch.setattr(RunDirectory, "read_given_plan", lambda self: open_plan)
    begun = plan_from(finished.id)
    assert begun.data.tokenizer is not None
    assert catalog.architecture(begun) == catalog.architecture(open_plan)


def test_a_new_run_starts_from_the_weights_of_a_run(
    finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(finished.path.parents[2]))
    best = best_step(finished)
    begun = plan_from(finished.id)
    check(begun)
    assert begun.model.weights == str(finished.checkpoints_path / f"step-{best:09d}")
    assert plan_from(f"{finished.id}@last").model.weights.endswith("step-000000008")  # type: ignore[union-attr]
    assert origin(begun).words == f"from the weights of run {finished.id} (step-{best:09d})"
    assert shortly(begun) == "from the weights of run"
    assert begun.data.tokenizer == str(finished.path / "tokenizer.json")
    with pytest.raises(
        PlanError, match=f'@step-5": no such checkpoint; .* has step-{best}, step-8'
    ):
        plan_from(f"{finished.id}@step-5")
    model = catalog.model(begun)
    found = trained.starting_weights(begun, model)
    own = trained.read(finished.path, "best").checkpoint
    for name in ("embedding.weight", "layers.0.mlp.up.weight"):
        np.testing.assert_array_equal(found.tensor(name), own.tensor(f"model.{name}"))
    other = replace(begun, {"model.target_params": 400_000})
    with pytest.raises(WeightsError, match="a model of other sizes"):
        trained.starting_weights(other, catalog.model(other))
    with pytest.raises(
        PlanError, match=r'model\.weights = "/nowhere": expected random, a checkpoint'
    ):
        check(replace(begun, {"model.weights": "/nowhere"}))


def test_a_new_run_from_weights_has_a_rate_of_its_own_and_a_resumed_one_keeps_its(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    unset = {"train__learning_rate": None, "train__weight_decay": None}
    given = plan(text, **unset, train__max_steps=2, train__preflight=False)
    run = create_run(recipe.with_recipe(given), by_recipe=recipe.settings_by_recipe(given))
    assert attempt(run, lambda phase, step: step == 1) == 75
    resume_with = resuming.changed(run.read_plan(), {"train.max_steps": 3})
    run.write_plan(resume_with)
    assert attempt(run) == 0, final(run)
    assert recipe.learning_rate(run.read_plan()) == 2e-3
    lines = [line for line in capfd.readouterr().out.splitlines() if "learning rate" in line]
    assert len(lines) == 2
    for line in lines:
        assert line.strip().startswith("learning rate 0.002; weight decay 0.1: for 200 k")
        assert line.endswith("as set: warm-up 3 steps")
    begun = plan_from(run.id)
    assert (recipe.learning_rate(begun), recipe.weight_decay(begun)) == (2e-4, 0.01)


def test_the_best_is_kept_if_a_stop_cut_its_evaluation_short(
    finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    best = best_step(finished)
    run = create_run(finished.read_plan())
    assert attempt(run, lambda phase, step: phase == "evaluate" and step == best) == 75
    assert attempt(run) == 0, final(run)
    assert [step_of(path) for path in run.committed_checkpoints()] == [best, 8]
    assert trained.read(run.path, "best").checkpoint.step == best


def test_a_run_that_began_with_another_runs_weights_goes_on_without_them(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    source = create_run(plan(text, train__max_steps=1, train__preflight=False))
    assert attempt(source) == 0, final(source)
    begun = plan_from(source.id)
    with pytest.raises(PlanError, match=r"add data\.tokenizer = .*tokenizer\.json"):
        check_start(replace(begun, {"data.tokenizer": None}))
    whole, broken = create_run(two := replace(begun, {"train.max_steps": 2})), create_run(two)
    assert attempt(whole) == 0, final(whole)
    assert attempt(broken, lambda phase, step: step == 1) == 75
    shutil.rmtree(source.path)
    assert attempt(broken) == 0, final(broken)
    assert state_hashes(broken) == state_hashes(whole)
    said = [one.weights for one in told(broken, events.Phase) if one.weights]
    assert said == [f"from the weights of run {source.id} (step-000000001)"] * 2
    with pytest.raises(PlanError, match="expected random, a checkpoint"):
        check(two)
    adapted = replace(two, {"optimize.lora_rank": 4, "optimize.freeze_base": True})
    present = resuming.without_lost_source(adapted, broken.path / "tokenizer.json")
    assert present.model == adapted.model, "its base lies nowhere else"


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_goes_on_with_its_own_tokenizer_once_the_given_one_is_gone(
    backend: str,
    finished: RunDirectory,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    given = shutil.copy(finished.path / "tokenizer.json", tmp_path / "given.json")
    settings = {"data__tokenizer": str(given), "train__max_steps": 2, "train__preflight": False}
    run = create_run(plan(text, backend, **settings))
    assert attempt(run, lambda phase, step: step == 1) == 75
    given.unlink()
    assert attempt(run) == 0, final(run)
    absent = tmp_path / "absent"
    assert resuming.without_lost_source(run.read_plan(), absent) == run.read_plan()


@pytest.mark.parametrize("links", [True, False])
def test_frozen_weights_of_another_run_are_kept_when_that_is_deleted(
    links: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    source = create_run(plan(text, train__max_steps=1, train__preflight=False))
    assert attempt(source) == 0, final(source)
    adapted = {"optimize.lora_rank": 2, "optimize.freeze_base": True, "train.max_steps": 2}
    first = borrowing(replace(plan_from(source.id), adapted))
    special = tokenizer_config.read(source.path)
    assert special.token("bos") is not None
    assert tokenizer_config.read(Path(first.read_plan().data.tokenizer or "").parent) == special
    shutil.rmtree(source.path)
    assert attempt(first, lambda phase, step: step == 1) == 75
    assert attempt(first) == 0, final(first)
    second = borrowing(replace(plan_from(first.id), adapted))  # adapters on merged adapters
    merged = trained.read(first.path).tensor("layers.0.mlp.up.weight")
    shutil.rmtree(first.path)
    found = trained.starting_weights(second.read_plan(), catalog.model(second.read_plan()))
    np.testing.assert_array_equal(found.tensor("layers.0.mlp.up.weight"), merged)
    words = f"from the weights of run {first.id} (step-000000002)"
    assert origin(second.read_plan()).words == words
    assert borrowing(source_plan := plan(text)).read_plan() == source_plan


def borrowing(wanted: Plan) -> RunDirectory:
    """A run as it is launched, with what it needs of others."""
    run = create_run(wanted)
    run.plan_path.write_text(plan_file.dumps(borrowed.keep(run, wanted), full=True))
    return run
