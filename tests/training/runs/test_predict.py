"""`memconsole predict` gives what evaluations measured, in both backends, and so do exported models."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.errors import UserError
from memconsole.plan.catalog.windows import DATASETS
from memconsole.plan.plan import DataChoice, Plan, replace
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer import chat, export, predict, sample
from memconsole_trainer.data.ratings.baselines import ranked
from memconsole_trainer.data.ratings.histories import Histories
from memconsole_trainer.data.ratings.reading import read_ratings
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.split import HELD, WindowSplit
from memconsole_trainer.tasks.recommendation import read_numbering
from tests.training.harness.runs import attempt, told
from tests.training.loop import test_recommendation_runs as recommendation
from tests.training.loop import test_regression_runs as regression
from tests.training.weights.test_new_files import room

BACKENDS = ("torch", "jax")
ITEMS, LENGTH = 14, 8
SHORT = {"train.max_steps": 12, "train.preflight": False, "train.checkpoint_every": 6}


@pytest.fixture(autouse=True, scope="module")
def _own_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty users with 5 to 14 ratings; all items occur."""
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("ratings") / "ratings.dat"
    lines = [
        f"{user}::{item}::5::{time}\n"
        for user in range(1, 41)
        for time, item in enumerate(draw.integers(1, ITEMS + 1, 5 + user % 10))
    ]
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return regression.write_windows(tmp_path_factory.mktemp("windows") / "windows.h5", 400)


class Runs:
    """Short runs of each task, backend and other settings, trained once."""

    def __init__(self, sources: dict[str, Path]) -> None:
        self.sources = sources
        self._runs: dict[Any, RunDirectory] = {}

    def __call__(self, task: str, backend: str, **changes: Any) -> RunDirectory:
        pytest.importorskip(backend)
        key = task, backend, *changes.items()
        if key not in self._runs:
            self._runs[key] = create_run(self.plan(task, backend, **changes))
            assert attempt(self._runs[key]) == 0
        return self._runs[key]

    def plan(self, task: str, backend: str, **changes: Any) -> Plan:
        source = self.sources[task]
        if task == "regression":
            return replace(regression.plan(source, backend, **changes), SHORT)
        sizes = {"model__items": ITEMS, "model__clusters": 4, "data__sequence_length": LENGTH}
        return replace(recommendation.plan(source, backend, **(sizes | changes)), SHORT)


@pytest.fixture(scope="module")
def runs(ratings: Path, windows: Path) -> Runs:
    return Runs({"recommendation": ratings, "regression": windows})


def called(module: Any, *arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", *map(str, arguments)])
        return int(module.main())


def predicted(run: RunDirectory, source: Path, out: Path, *options: str) -> Path:
    assert called(predict, run.path, source, out, "--checkpoint=last", *options) == 0
    return out


def recommended(out: Path) -> dict[str, list[tuple[str, float]]]:
    """Items with their scores by user, in the order of their ranks."""
    found: dict[str, list[tuple[str, float]]] = {}
    with open(out, newline="") as file:
        for row in csv.DictReader(file):
            listed = found.setdefault(row["user"], [])
            listed.append((row["item"], float(row["score"])))
            assert row["rank"] == str(len(listed))
    return found


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("torch", {}),
        ("jax", {}),
        ("torch", {"model__items": 3 * ITEMS}),
        pytest.param("jax", {"model__items": 3 * ITEMS}, marks=pytest.mark.slow),
        pytest.param(
            "jax",
            {"optimize__base_storage": "int8", "optimize__precision": "bf16"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=("torch", "jax", "torch-absent", "jax-absent", "jax-int8"),
)
def test_ranks_of_held_out_items_give_the_measures_that_the_run_reported(
    backend: str, changes: dict[str, str], runs: Runs, ratings: Path, tmp_path: Path
) -> None:
    run = runs("recommendation", backend, **changes)
    stored, ids = read_ratings(ratings, DataChoice(), lambda: None), read_numbering(run.path).ids()
    items = read_numbering(run.path).items_of(stored)
    fraction = run.read_plan().data.validation_fraction
    histories = Histories(stored.users, items, fraction)
    targets, lines = [], []
    for begin, first, end in histories.held_rows(LENGTH):
        for at in range(first, end):  # what came before each held-out item, as a user's ratings
            lines += [
                f"{len(targets)}::{ids[item - 1]}::5::{time}\n"
                for time, item in enumerate(items[begin:at])
            ]
            targets.append(ids[items[at] - 1])
    source = tmp_path / "before.dat"
    source.write_text("".join(lines))
    out = predicted(run, source, tmp_path / "next.csv", "--seen", f"--top={ITEMS}")
    found = recommended(out)
    ranks = [
        [item for item, _ in found[str(user)]].index(target) + 1
        for user, target in enumerate(targets)
    ]
    last = told(run, events.Evaluation)[-1]
    for key, value in ranked(np.array(ranks)).items():
        assert value == pytest.approx(last.metrics[key], rel=1e-5), key
    own = [dict(found[str(user)])[target] for user, target in enumerate(targets)]
    assert -np.mean(own) == pytest.approx(last.loss, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_of_held_out_windows_give_the_loss_that_the_run_reported(
    backend: str, runs: Runs, windows: Path, tmp_path: Path
) -> None:
    run = runs("regression", backend)
    out = predicted(run, windows, tmp_path / "outputs.h5")
    file = WindowFile(windows, regression.FEATURES, regression.OUTPUTS, regression.LENGTH, None)
    held = WindowSplit(file, 0.2, lambda: None).sides(0, file.count) == HELD
    rows = file.read(0, file.count)
    with h5py.File(out) as made:
        missed = made["normalized_outputs"][:] - rows.targets
        assert np.array_equal(made["outputs"][:], made["normalized_outputs"][:])
    loss = (rows.mask * missed**2)[held].sum() / rows.mask[held].sum()
    assert loss == pytest.approx(told(run, events.Evaluation)[-1].loss, rel=1e-5)


@pytest.mark.parametrize(
    "task", ["recommendation", pytest.param("regression", marks=pytest.mark.slow)]
)
def test_both_backends_predict_the_same_with_the_same_weights(
    task: str, runs: Runs, ratings: Path, windows: Path, tmp_path: Path
) -> None:
    changes = {"optimize__freeze_base": False} if task == "recommendation" else {}
    first = runs(task, "torch", **changes)
    pytest.importorskip("jax")
    second = create_run(runs.plan(task, "jax", **changes))
    shutil.copytree(first.checkpoints_path, second.checkpoints_path, dirs_exist_ok=True)
    if task == "recommendation":
        shutil.copy(first.path / "items.json", second.path)
        one, other = (
            recommended(predicted(run, ratings, tmp_path / f"{run.id}.csv"))
            for run in (first, second)
        )
        assert one.keys() == other.keys()
        for user, listed in one.items():
            assert [item for item, _ in listed] == [item for item, _ in other[user]]
            scores = [score for _, score in other[user]]
            assert scores == pytest.approx([score for _, score in listed], abs=2e-5)
    else:
        paths = [predicted(run, windows, tmp_path / f"{run.id}.h5") for run in (first, second)]
        with h5py.File(paths[0]) as one, h5py.File(paths[1]) as other:
            np.testing.assert_allclose(other["outputs"], one["outputs"], atol=2e-5)


def test_users_get_new_items_and_unknown_items_are_named_once(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs("recommendation", "torch", model__items=ITEMS + 1)  # one place holds no item
    source = tmp_path / "new.csv"
    # User 7 has more items than the context; user 9 has none that the run knows.
    own = [*range(1, 11), 99, 98]
    lines = ["userId,movieId,timestamp", *(f"7,{item},{t}" for t, item in enumerate(own))]
    source.write_text("\n".join([*lines, "8,3,1", "9,98,1"]))
    everything = recommended(predicted(run, source, tmp_path / "all.csv"))
    assert {user: len(listed) for user, listed in everything.items()} == {"7": 4, "8": 10}
    said = capsys.readouterr()
    assert said.err == (
        f"warning: {source}: left out items that the run does not know (2): 98, 99; "
        "left out users without other items: 1\n"
    )
    assert said.out.endswith(
        f": 14 items for 2 users, at most 10 for each in {tmp_path / 'all.csv'}\n"
    )
    assert {item for item, _ in everything["7"]} == {"11", "12", "13", "14"}
    assert "3" not in dict(everything["8"])
    few = recommended(predicted(run, source, tmp_path / "few.csv", "--top=2"))
    assert f": 2 items for each of 2 users in {tmp_path / 'few.csv'}" in capsys.readouterr().out
    assert few["8"] == everything["8"][:2]
    # Only the last items are the context, in the order of time.
    source.write_text("\n".join([lines[0], *(f"7,{item},{item}" for item in range(10, 2, -1))]))
    last = recommended(predicted(run, source, tmp_path / "last.csv", "--top=14"))["7"]
    assert [pair for pair in last if pair[0] not in ("1", "2")] == everything["7"]


def test_outputs_have_the_units_of_each_system_and_are_zero_where_it_has_none(
    runs: Runs, windows: Path, tmp_path: Path
) -> None:
    run = runs("regression", "torch")
    source = tmp_path / "unlabelled.h5"
    with h5py.File(windows) as whole, h5py.File(source, "w") as file:
        file["input_sequences"] = whole["input_sequences"][:37]
        file["system_ids"] = np.array([b"cart", b"arm"])[np.arange(37) % 2]
        file["normalization/cart/control_max"] = [10.0]
        file["normalization/arm/control_max"] = [2.0, 3.0]
    out = predicted(run, source, tmp_path / "outputs.h5")
    with h5py.File(out) as made, h5py.File(windows) as whole:
        normalized, outputs = made["normalized_outputs"][:], made["outputs"][:]
        assert normalized.shape == outputs.shape == (37, 6)
    assert np.abs(normalized).min() > 0
    np.testing.assert_allclose(outputs[0::2], normalized[0::2] * [10, 0, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(outputs[1::2], normalized[1::2] * [2, 3, 0, 0, 0, 0], rtol=1e-6)


def test_what_cannot_be_used_is_refused_in_one_line(
    runs: Runs,
    ratings: Path,
    windows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recommender, regressor = (runs(task, "torch") for task in ("recommendation", "regression"))
    full, empty, unknown = tmp_path / "full", tmp_path / "empty", tmp_path / "unknown.dat"
    pipe = tmp_path / "pipe"
    full.write_text("something")
    empty.touch()
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    unknown.write_text("1::99::5::1\n")
    named = tmp_path / "named.csv"
    named.write_text("who,what\n1,2\n")
    bare = create_run(runs.plan("regression", "torch"))
    text = create_run(replace(Plan(), {"data.source": str(tmp_path)}))
    shutil.copytree(regressor.checkpoints_path, text.checkpoints_path, dirs_exist_ok=True)
    new = tmp_path / "new"
    for arguments, message in (
        ((bare.path, windows, new), "has no intact checkpoint yet"),
        ((text.path, windows, new), "the run learned language: use memconsole sample"),
        ((recommender.path, tmp_path / "absent.dat", new), "cannot be read: No such file"),
        ((recommender.path, windows, new), f"{windows}: line 1: "),
        ((recommender.path, unknown, new), "holds no item that the run knows"),
        ((recommender.path, named, new), "users; set --user-column to one of: who, what"),
        ((recommender.path, named, new, "--user-column=i"), f'--user-column = "i": {named} has'),
        ((regressor.path, ratings, new), f"{ratings}: not a readable HDF5 file"),
        ((regressor.path, tmp_path / "absent.h5", new), "the file does not exist"),
        ((regressor.path, windows, new, "--top=3"), "but the run learned regression"),
        ((regressor.path, windows, new, "--user-column=who"), "but the run learned regression"),
        ((regressor.path, windows, new, "--checkpoint=step-5"), "step-5: it is not kept; there"),
        ((regressor.path, windows, full), "exists and is not empty; --overwrite replaces it"),
        ((regressor.path, windows, pipe), f"{pipe}: is not a regular file"),
        ((regressor.path, windows, tmp_path / "link", "--overwrite"), "is not a regular file"),
        ((regressor.path, windows, windows, "--overwrite"), "is the input"),
        ((regressor.path, windows, tmp_path / "none" / "x"), "a folder that exists"),
    ):
        assert called(predict, *arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.startswith("memconsole: ")
        assert said.count("\n") == 1
        assert not new.exists()
    assert full.read_text() == "something"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]
    predicted(regressor, windows, empty)
    predicted(regressor, windows, full, "--overwrite")
    for module in (sample, chat):
        assert called(module, regressor.path) == 2
        said = capsys.readouterr().err
        assert "only language models write text: use memconsole predict" in said
    with pytest.raises(UserError, match='no run "absent"'):
        CliRunner().invoke(cli, ["predict", "absent", "in", "out"], catch_exceptions=False)


@pytest.mark.parametrize("task", ["recommendation", "regression"])
def test_a_full_disk_is_one_line_and_nothing_is_left(
    task: str,
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, source, out = runs(task, "torch"), runs.sources[task], tmp_path / "out"
    for module, arguments in ((predict, (run.path, source, out)), (export, (run.path, out))):
        with room(3000):
            assert called(module, *arguments) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"memconsole: {out}: cannot be written: File too large"
        assert list(tmp_path.iterdir()) == []
    if task == "regression":
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        assert called(predict, run.path, source, out) == 2
        assert f"{tmp_path}: 100 B free, the outputs take 18.8 KiB" in capsys.readouterr().err


def test_the_command_runs_the_trainer_with_its_options(
    runs: Runs, ratings: Path, tmp_path: Path
) -> None:
    run = runs("recommendation", "torch")
    # The same ratings in columns of other names.
    source, out = tmp_path / "other.csv", tmp_path / "items.csv"
    rows = [line.split("::") for line in ratings.read_text().splitlines()]
    lines = ["moment,thing,who", *(f"{time},{item},{user}" for user, item, _, time in rows)]
    source.write_text("\n".join(lines))
    options = ["--top=3", "--seen", "--checkpoint=step-6"]
    columns = ["--user-column=who", "--item-column=thing", "--time-column=moment"]
    arguments = ["predict", run.id, str(source), str(out), *options, *columns]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0
    assert done.output.endswith(f": 3 items for each of 40 users in {out}\n")
    assert {len(listed) for listed in recommended(out).values()} == {3}
    again = tmp_path / "again.csv"
    assert called(predict, run.path, ratings, again, *options) == 0
    assert again.read_text() == out.read_text()


ALONE = """
import runpy, sys
sys.modules |= dict.fromkeys(("memconsole", "memconsole_trainer", "memconsole_torch"))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program that cannot import memconsole."""


def alone(folder: Path, *arguments: object) -> str:
    """What the program of an exported model prints, in a process of its own."""
    done = _alone(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused_alone(folder: Path, *arguments: object) -> str:
    """What the program of an exported model says about arguments that it cannot use."""
    done = _alone(folder, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def _alone(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", ALONE, str(folder / "model.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_an_exported_recommender_recommends_the_same_without_memconsole(
    backend: str, runs: Runs, ratings: Path, tmp_path: Path
) -> None:
    """The checkpoint lacks the frozen decoder; the export holds it."""
    run, out = runs("recommendation", backend), tmp_path / "model"
    assert called(export, run.path, out, "--checkpoint=last") == 0
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "items.json", "model.py", "model.safetensors")
    }
    expected = recommended(predicted(run, ratings, tmp_path / "next.csv"))["9"]
    stored = read_ratings(ratings, DataChoice(), lambda: None)
    history = stored.items[stored.users == 9]
    assert len(history) > LENGTH
    found = [line.split("\t") for line in alone(out, *history).splitlines()]
    assert [item for item, _ in found] == [item for item, _ in expected]
    scores = [float(score) for _, score in found]
    assert scores == pytest.approx([score for _, score in expected], abs=2e-5)
    assert refused_alone(out) == "usage: python model.py ITEM...   (the last one is the newest)\n"
    assert refused_alone(out, "none") == "the history holds no item that the model knows\n"


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_an_exported_regressor_gives_the_same_outputs_without_memconsole(
    backend: str, runs: Runs, windows: Path, tmp_path: Path
) -> None:
    run, out = runs("regression", backend), tmp_path / "model"
    assert called(export, run.path, out, "--checkpoint=last") == 0
    made = predicted(run, windows, tmp_path / "outputs.h5")
    with h5py.File(windows) as file:
        np.save(tmp_path / "windows.npy", file["input_sequences"][:])
    alone(out, tmp_path / "windows.npy", tmp_path / "outputs.npy")
    with h5py.File(made) as file:
        expected = file["normalized_outputs"][:]
    np.testing.assert_allclose(np.load(tmp_path / "outputs.npy"), expected, atol=2e-5)
    assert refused_alone(out) == "usage: python model.py WINDOWS.npy OUTPUTS.npy\n"


def test_exports_hold_the_constants_of_the_data_and_refuse_what_is_of_language(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = regression.write_windows(
        tmp_path / "windows.h5", 200, system_ids=np.array([b"cart"] * 200)
    )
    with h5py.File(source, "a") as file:
        file["normalization/cart/state_max"] = [1.0, 2.0]
        file["normalization/cart/control_max"] = [10.0]
    run = Runs({"regression": source})("regression", "torch")
    assert called(export, run.path, tmp_path / "model") == 0
    constants = json.loads((tmp_path / "model" / "normalization.json").read_text())
    assert constants == {"cart": {"state_max": [1.0, 2.0], "control_max": [10.0]}}
    assert "normalization.json" in capsys.readouterr().out
    assert called(export, run.path, tmp_path / "other", "peft") == 2
    assert "--format peft: is for runs that learned language" in capsys.readouterr().err
    assert called(export, run.path, tmp_path / "model") == 2
    assert "exists and is not empty" in capsys.readouterr().err
    source.unlink()
    assert called(export, run.path, tmp_path / "narrow", "--dtype=bfloat16") == 0
    assert "without normalization.json: " in capsys.readouterr().out
    assert not (tmp_path / "narrow" / "normalization.json").exists()
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"
    with h5py.File(source, "w") as file:  # other data are in its place now
        for name, shape in zip(DATASETS, ((9, 4, 12), (9, 3), (9, 3)), strict=True):
            file[name] = np.zeros(shape)
    assert called(export, run.path, tmp_path / "later") == 0
    sizes = json.loads((tmp_path / "later" / "config.json").read_text())
    assert (sizes["features"], sizes["outputs"]) == (regression.FEATURES, regression.OUTPUTS)
