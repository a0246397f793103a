"""Whole runs of the regression task with the real engines, on windows of a file that the tests make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole import start
from memconsole.plan import catalog
from memconsole.plan.data.made import Size, kind, parse_options
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.read.report.report import report
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.split import WindowSplit
from memconsole_trainer.tasks.regression import open_data
from memconsole_trainer.weights.trained import read
from tests.training.harness.runs import attempt, state_hashes, told
from tests.unit.data.quiet import Quiet

BACKENDS = ("torch", "jax")
LENGTH, FEATURES, OUTPUTS = 8, 19, 6
TINY: dict[str, Any] = {
    "model.name": "lqr",
    "data.sequence_length": LENGTH,
    "data.shuffle_buffer": 200,
    "data.validation_fraction": 0.2,
    "train.batch_size": 16,
    "train.epochs": 3,
    "train.log_every": 5,
    "train.learning_rate": 2e-3,
    "train.warmup_steps": 5,
    "optimize.accumulation_steps": 2,
    "device.name": "cpu",
}


def narrow(rows: int = 800) -> dict[str, Any]:
    """Windows of 7 features to 3 outputs."""
    draw = np.random.default_rng(1)
    windows = draw.normal(size=(rows, LENGTH, 7)).astype(np.float32)
    return {
        "input_sequences": windows,
        "controls": windows[:, -1, :3],
        "control_masks": np.ones((rows, 3), np.float32),
    }


def write_windows(path: Path, rows: int = 800, **changes: Any) -> Path:
    """Windows of random walks of 12 states, 20 to a trajectory; the controls are a squashed linear map of the last."""
    draw = np.random.default_rng(0)
    walks = np.cumsum(draw.normal(size=(rows, LENGTH, 12)) * 0.3, axis=1)
    windows = np.concatenate([walks, np.ones((rows, LENGTH, 7))], axis=2)
    controls = np.tanh(walks[:, -1] @ draw.normal(size=(12, OUTPUTS)) * 0.4)
    mask = np.ones((rows, OUTPUTS))
    mask[:, 4:] = 0
    arrays = {
        "input_sequences": windows.astype(np.float32),
        "controls": controls.astype(np.float32),
        "control_masks": mask.astype(np.float32),
        "trajectory_ids": np.arange(rows) // 20,
    } | changes
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if values is not None:
                chunks = (min(50, len(values)), *values.shape[1:])
                file.create_dataset(name, data=values, chunks=chunks)
    return path


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_windows(tmp_path_factory.mktemp("windows") / "windows.h5")


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan(path: Path, backend: str, **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(Plan(), {**TINY, "backend": backend, "data.source": str(path), **settings})


def test_an_evaluation_of_weights_that_diverged_is_told(windows: Path) -> None:
    changes = {"train__learning_rate": 10.0, "train__log_every": 100, "train__warmup_steps": 0}
    changes |= {"optimize__optimizer": "sgd", "train__grad_clip": 0.0}
    run = create_run(
        plan(windows, "torch", train__evaluate_every=5, train__max_steps=20, **changes)
    )
    attempt(run)
    last = told(run, events.Evaluation)[-1]
    assert last.loss is None
    assert np.isfinite(list(last.metrics.values())).all()
    assert "zero_loss" in last.metrics


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_learns_the_controls_and_beats_its_baselines(backend: str, windows: Path) -> None:
    pytest.importorskip(backend)
    run = create_run(plan(windows, backend, train__epochs=8))
    assert attempt(run) == 0
    build = [p for p in told(run, events.Phase) if p.parameters is not None]
    assert build[-1].parameters == build[-1].trainable_parameters == 208_774
    last = told(run, events.Evaluation)[-1]
    assert set(last.metrics) == {
        *("zero_loss", "linear_loss", "window_loss", "mean_absolute_error"),
        *("least_rmse", "most_rmse"),
    }
    assert last.bits_per_byte is None
    assert last.loss < 0.5 * last.metrics["zero_loss"]
    assert last.metrics["linear_loss"] < last.metrics["zero_loss"]
    assert 0 < last.metrics["mean_absolute_error"] ** 2 <= last.loss
    steps = told(run, events.Step)
    assert steps[-1].tokens % (8 * 20) == 0  # eight epochs of whole trajectories of 20 windows
    assert 8 * 500 <= steps[-1].tokens < 8 * 800
    found = report(run)
    assert found.evaluations[-1].metrics == last.metrics
    assert (found.task, found.unit) == ("regression", "window")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_run_ends_bitwise_where_an_uninterrupted_one_ends(
    backend: str, windows: Path
) -> None:
    pytest.importorskip(backend)
    whole, broken = create_run(plan(windows, backend)), create_run(plan(windows, backend))
    assert attempt(whole) == 0
    for stop in (7, 26):
        assert attempt(broken, lambda phase, step, stop=stop: step >= stop) == 75
    assert attempt(broken) == 0
    assert state_hashes(broken) == state_hashes(whole)
    last, expected = told(broken, events.Evaluation)[-1], told(whole, events.Evaluation)[-1]
    assert (last.loss, last.metrics) == (expected.loss, expected.metrics)
    assert last.train_loss == expected.train_loss is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_trains_the_size_that_its_plan_chooses(backend: str, windows: Path) -> None:
    pytest.importorskip(backend)
    made = plan(windows, backend, model__layers=1, model__hidden_size=24, train__max_steps=2)
    run = create_run(made)
    assert attempt(run) == 0
    build = [p for p in told(run, events.Phase) if p.parameters is not None][-1]
    assert build.parameters == sum(p.size for p in catalog.model(made).parameters()) < 12_000
    assert read(run.path).model == catalog.model(made)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_has_the_widths_of_its_windows(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    launched: list[Plan] = []
    monkeypatch.setattr(start, "launch", lambda plan, *_, **__: launched.append(plan))
    path = write_windows(tmp_path / "narrow.h5", **narrow())
    given = plan(path, backend, model__layers=1, train__max_steps=2)
    start.start(given, None, None)
    run = create_run(launched[0])
    assert attempt(run) == 0
    path.unlink()
    model = read(run.path).model
    assert isinstance(model, Regressor)
    assert (model.features, model.outputs) == (7, 3)
    build = [p for p in told(run, events.Phase) if p.parameters is not None][-1]
    assert build.parameters == sum(p.size for p in model.parameters())


def test_widths_that_only_the_trainer_can_read_are_named(tmp_path: Path) -> None:
    path = write_windows(tmp_path / "narrow.h5", **narrow())
    other = plan(path, "torch", model__features=19, model__outputs=6, train__max_steps=1)
    run = create_run(other)
    assert attempt(run) != 0
    (error,) = told(run, events.Error)
    assert "holds windows of 7 features to 3 outputs, the model has 19 and 6" in error.message
    assert "set model.features = 7 and model.outputs = 3" in error.message


def test_systems_are_controlled_in_trials_only_if_the_windows_have_their_features(
    tmp_path: Path,
) -> None:
    options = parse_options(kind("lqr"), ["families=dc_motor,two_masses", "variants=2"])
    path = tmp_path / "lqr.h5"
    make(Request("lqr", path, Size(220, None), 0, options))
    with h5py.File(path, "a") as file:
        windows = file["input_sequences"][:, :, :14]
        del file["input_sequences"]
        file["input_sequences"] = windows
    data = open_data(made := plan(path, "torch"), catalog.model(made), tmp_path, Quiet(), {})
    assert data._file.systems
    assert not data._trials


def test_a_run_begins_with_what_another_one_has_learned_and_writes_no_text(windows: Path) -> None:
    first = create_run(plan(windows, "torch"))
    assert attempt(first) == 0
    best = {"model__weights": str(first.path / "checkpoints" / "best")}
    second = create_run(
        plan(windows, "torch", train__max_steps=1, train__learning_rate=1e-9, **best)
    )
    assert attempt(second) == 0
    losses = [e.loss for e in told(first, events.Evaluation)]
    assert told(second, events.Evaluation)[-1].loss == pytest.approx(min(losses), rel=1e-4)
    found = read(first.path)
    for ask in (found.tokenizer, lambda: found.architecture):
        with pytest.raises(PlanError, match="learned regression; only language models write text"):
            ask()


def test_both_backends_learn_the_same_and_measure_control_of_unseen_families(
    tmp_path: Path,
) -> None:
    names = "yaw_stability,two_masses,cart_pendulum,lane_keeping,dc_motor,path_tracking"
    options = parse_options(kind("lqr"), [f"families={names}", "variants=3"])
    path = tmp_path / "lqr.h5"
    make(Request("lqr", path, Size(660, None), 0, options))
    found = []
    for backend in BACKENDS:
        pytest.importorskip(backend)
        run = create_run(plan(path, backend, train__epochs=1))
        assert attempt(run) == 0
        (last,) = told(run, events.Evaluation)
        found.append(last.metrics | {"loss": last.loss})
        made = report(run)
        assert made.evaluations[-1].metrics == last.metrics
        assert made.best is not None
        assert (made.best.measure, made.best.value) == ("cost_ratio", last.metrics["cost_ratio"])
    assert set(found[0]) == {
        *("loss", "mean_absolute_error", "least_rmse", "most_rmse"),
        *("zero_loss", "linear_loss", "window_loss", "ridge_loss"),
        *("unseen_loss", "unseen_zero_loss", "unseen_linear_loss"),
        *(
            f"{side}{of}cost_ratio"
            for side in ("", "seen_")
            for of in ("", "zero_", "linear_", "ridge_")
        ),
    }
    for torch_value, jax_value in zip(found[0].values(), found[1].values(), strict=True):
        assert jax_value == pytest.approx(torch_value, rel=2e-2)
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=5e-3)
    assert found[0]["ridge_loss"] < found[0]["linear_loss"] < found[0]["zero_loss"]
    assert 0.99 < found[0]["seen_ridge_cost_ratio"] < found[0]["seen_zero_cost_ratio"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"control_masks": np.zeros((800, OUTPUTS), np.float32)}, "control_masks is 0"),
        ({"controls": None}, "lacks controls"),
        ({"controls": np.zeros((800, 5), np.float32)}, "expected (800, 5), as controls has"),
        ({"input_sequences": np.zeros((800, 19), np.float32)}, "has shape (800, 19)"),
        ({"input_sequences": np.zeros((700, 8, 19), np.float32)}, "input_sequences 700"),
        ({"input_sequences": np.zeros((800, 4, 19), np.float32)}, "hold 4 steps"),
        ({"trajectory_ids": np.zeros(799, np.int64)}, "trajectory_ids has shape (799,)"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_windows(tmp_path / "bad.h5", **changes)
    run = create_run(plan(path, "torch"))
    assert attempt(run) != 0
    (error,) = told(run, events.Error)
    assert message in error.message
    assert str(path) in error.message


def test_a_number_that_is_not_finite_is_named_with_its_row(tmp_path: Path) -> None:
    values = np.zeros((800, OUTPUTS), np.float32)
    values[123, 2] = np.nan
    run = create_run(plan(write_windows(tmp_path / "nan.h5", controls=values), "torch"))
    assert attempt(run) != 0
    (error,) = told(run, events.Error)
    assert "row 123 of controls" in error.message


def test_a_single_trajectory_is_trained_on(tmp_path: Path) -> None:
    for number in range(8):  # some of which a hash would hold out
        ids = np.full(800, number)
        path = write_windows(tmp_path / f"{number}.h5", trajectory_ids=ids)
        split = WindowSplit(WindowFile(path, FEATURES, OUTPUTS, LENGTH, None), 0.2, lambda: None)
        assert (split.train_rows, split.held_rows) == (800, 0)


def test_settings_of_text_are_refused_for_windows(windows: Path) -> None:
    from memconsole.plan.check import check

    check(plan(windows, "torch"))
    with pytest.raises(PlanError, match="no base to freeze"):
        check(plan(windows, "torch", optimize__lora_rank=8, optimize__freeze_base=True))
    with pytest.raises(PlanError, match=r"expected an HDF5 file .* \(rows, steps, features\)"):
        check(plan(windows, "torch", data__source="python-stdlib"))
    with pytest.raises(PlanError, match="128 positions"):
        check(plan(windows, "torch", data__sequence_length=256))
