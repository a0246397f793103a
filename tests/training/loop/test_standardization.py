"""Runs on windows in natural units: they are standardized, in both backends, and everything that people read is in the
units of the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer import export, predict
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.split import HELD, WindowSplit
from memconsole_trainer.data.windows.standardization import STANDARDIZATION_JSON, kept
from tests.training.harness.runs import attempt, state_hashes, told
from tests.training.loop.test_regression_runs import LENGTH, narrow, plan, write_windows
from tests.training.runs.test_predict import alone

BACKENDS = ("torch", "jax")
FEATURES, OUTPUTS = 7, 3


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def natural(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows around 300, and outputs around 5,000."""
    found = narrow(400)
    found["input_sequences"] = found["input_sequences"] * 50 + np.float32(300)
    found["controls"] = found["controls"] * np.float32([1000, 10, 2000]) + np.float32(5000)
    ids = np.arange(400) // 20
    path = tmp_path_factory.mktemp("windows") / "natural.h5"
    return write_windows(path, 400, **found, trajectory_ids=ids)


def short(path: Path, backend: str, **changes: Any) -> Plan:
    sizes = {"model__layers": 1, "model__hidden_size": 16, "model__heads": 2}
    return plan(path, backend, **(sizes | {"train__epochs": 1} | changes))


def trained(made: Plan) -> RunDirectory:
    run = create_run(made)
    assert attempt(run) == 0
    return run


def called(module: Any, *arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", *map(str, arguments)])
        return int(module.main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_natural_units_are_learned_and_errors_are_told_in_them(
    backend: str, natural: Path, tmp_path: Path
) -> None:
    pytest.importorskip(backend)
    run = trained(short(natural, backend, train__epochs=4, train__learning_rate=1e-2))
    last = told(run, events.Evaluation)[-1]
    assert last.loss < 0.5 * last.metrics["mean_loss"]
    assert last.metrics["mean_loss"] == pytest.approx(1, rel=0.3)
    assert "zero_loss" not in last.metrics
    out = tmp_path / "outputs.h5"
    assert called(predict, run.path, natural, out, "--checkpoint=last") == 0
    file = WindowFile(natural, FEATURES, OUTPUTS, LENGTH, None)
    held = WindowSplit(file, 0.2, lambda: None).sides(0, file.count) == HELD
    rows = file.read(0, file.count)
    with h5py.File(out) as made:
        outputs = made["outputs"][:]
        assert np.array_equal(outputs, made["normalized_outputs"][:])
    missed = (outputs - rows.targets)[held].astype(np.float64)
    assert last.metrics["units_loss"] == pytest.approx((missed**2).mean(), rel=1e-4)
    assert last.metrics["mean_absolute_error"] == pytest.approx(np.abs(missed).mean(), rel=1e-4)
    for output, rmse in enumerate(np.sqrt((missed**2).mean(0))):
        assert last.metrics[f"rmse_{output + 1}"] == pytest.approx(rmse, rel=1e-4)
    if backend == "jax":
        return
    # An exported model gives the same.
    assert called(export, run.path, tmp_path / "model", "--checkpoint=last") == 0
    np.save(tmp_path / "windows.npy", rows.windows)
    alone(tmp_path / "model", tmp_path / "windows.npy", tmp_path / "outputs.npy")
    np.testing.assert_allclose(np.load(tmp_path / "outputs.npy"), outputs, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_run_goes_on_with_the_same_standardization(backend: str, natural: Path) -> None:
    pytest.importorskip(backend)
    whole, broken = (create_run(short(natural, backend)) for _ in range(2))
    assert attempt(whole) == 0
    assert attempt(broken, lambda phase, step: step >= 4) == 75
    assert attempt(broken) == 0
    assert state_hashes(broken) == state_hashes(whole)
    assert kept(broken.path) == kept(whole.path)


def test_a_run_that_lost_its_standardization_is_not_continued(natural: Path) -> None:
    run = create_run(short(natural, "torch"))
    assert attempt(run, lambda phase, step: step >= 4) == 75
    (run.path / STANDARDIZATION_JSON).unlink()
    assert attempt(run) not in (0, 75)
    (error,) = told(run, events.Error)
    assert f"{run.path / STANDARDIZATION_JSON}: does not hold what the run was" in error.message


def test_the_setting_decides_and_files_that_say_they_are_normalized_stay_as_they_are(
    natural: Path, tmp_path: Path
) -> None:
    once = {"train__max_steps": 1}
    never = trained(short(natural, "torch", data__standardize="never", **once))
    assert kept(never.path) is None
    assert "zero_loss" in told(never, events.Evaluation)[-1].metrics
    near = write_windows(tmp_path / "near.h5", **narrow())
    assert kept(trained(short(near, "torch", **once)).path) is None
    always = trained(short(near, "torch", data__standardize="always", **once))
    assert kept(always.path) is not None
    said = tmp_path / "said.h5"
    said.write_bytes(natural.read_bytes())
    with h5py.File(said, "a") as file:
        file["normalization/plant/control_max"] = [1.0]
    assert kept(trained(short(said, "torch", **once)).path) is None
    with pytest.raises(PlanError, match=r'data\.standardize = "always": is for windows of numbers'):
        check(replace(Plan(), {"data.standardize": "always"}))


def test_a_run_with_the_weights_of_another_standardizes_as_it_did(
    natural: Path, tmp_path: Path
) -> None:
    first = trained(short(natural, "torch"))
    near = write_windows(tmp_path / "near.h5", **narrow())
    best = str(first.path / "checkpoints" / "best")
    second = trained(short(near, "torch", model__weights=best, train__max_steps=1))
    assert kept(second.path) == kept(first.path) is not None
