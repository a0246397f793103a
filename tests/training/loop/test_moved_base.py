"""A run whose model's folder has moved is sampled, exported and resumed if its checkpoints hold every weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from memconsole.cli.from_run import plan_from
from memconsole.cli.main import cli
from memconsole.plan.plan import PlanError, replace
from memconsole.plan.training import resuming
from memconsole.runs.act import launch
from memconsole.runs.record.checkpoints import base
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures.failure import ExitCode
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.text.tokens.tokenizer import train
from memconsole_trainer.weights import export, trained
from memconsole_trainer.weights.export_run import export_run
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness.runs import attempt, final, plan, told

pytest.importorskip("torch")
tiny_models = pytest.importorskip("tests.training.harness.tiny_models")

GONE = "the folder this run was fine-tuned from is gone: "
LORA = {"optimize__lora_rank": 2, "optimize__freeze_base": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory with weights, a tokenizer and generation settings."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    architecture = msgspec.structs.replace(tiny_models.ARCHITECTURES["llama"], vocab_size=320)
    folder = tmp_path / "base"
    export.export(architecture, InitialWeights(architecture, 5), folder, "bfloat16")
    train(["some words of a text\n"] * 40, 300).save(folder / "tokenizer.json")
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    return folder


def launched(folder: Path, text: Path, **changes: Any) -> RunDirectory:
    """A run as it is launched, with the files of its model."""
    short = {"train__max_steps": 2, "train__preflight": False}
    named = {"model__name": str(folder), "model__target_params": None, "data__vocab_size": None}
    run = create_run(plan(text, **short, **named, **changes))
    base.keep(run, run.read_plan())
    return run


def contents(run: RunDirectory, out: Path) -> dict[str, bytes]:
    """The files of an export, which says that weights were rounded only if no type was asked for."""
    found = trained.read(run.path)
    for dtype in ("float32", "float16"):
        assert export_run(found, out, dtype) == []
    (said,) = export_run(found, out)
    assert said.startswith("the weights are rounded to bfloat16, as the base is stored")
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_a_run_with_every_weight_needs_the_folder_no_more(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    run = launched(folder, text)
    assert attempt(run) == 0, final(run)
    assert sorted(path.name for path in (run.path / base.FOLDER).iterdir()) == [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    before = contents(run, tmp_path / "before")
    assert json.loads(before["config.json"])["dtype"] == "bfloat16"
    assert json.loads(before["generation_config.json"])["temperature"] == 0.7
    shutil.rmtree(folder)
    assert contents(run, tmp_path / "after") == before
    run.write_plan(resuming.changed(run.read_plan(), {"train.max_steps": 3}))
    assert attempt(run) == 0, final(run)
    assert trained.read(run.path).checkpoint.step == 3
    *_, said = [one.weights for one in told(run, events.Phase) if one.weights]
    assert said == f"fine-tunes {folder}, which is gone"
    assert plan_from(run.id).model.name == str(run.path / base.FOLDER)
    priced = CliRunner().invoke(cli, ["plan", "--from", run.id, "--json"])
    assert f"from the weights of run {run.id} (step-000000003)" in priced.output


def test_weights_that_lie_in_the_folder_alone_are_missed_by_its_name(
    folder: Path, text: Path
) -> None:
    adapted, new = launched(folder, text, **LORA), launched(folder, text)
    assert attempt(adapted) == 0, final(adapted)
    weight = trained.read(adapted.path).tensor("layers.0.mlp.up.weight")
    moved = folder.rename(folder.with_name("moved"))
    with pytest.raises(PlanError, match=f"^{GONE}{folder}; put it back there$"):
        trained.read(adapted.path)
    assert attempt(new) == ExitCode.BAD_PLAN  # it has trained nothing
    (error,) = told(new, events.Error)
    assert error.message.startswith(f"{GONE}{folder}")
    moved.rename(folder)
    np.testing.assert_array_equal(
        trained.read(adapted.path).tensor("layers.0.mlp.up.weight"), weight
    )


def test_adapters_on_the_weights_of_such_a_run_know_them_when_all_is_deleted(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = launched(folder, text)
    assert attempt(source) == 0, final(source)
    shutil.rmtree(folder)
    monkeypatch.setattr(launch, "start_supervisor", lambda run, mode: 1)
    adapted = {key.replace("__", "."): value for key, value in LORA.items()}
    run = launch.launch(replace(plan_from(source.id), adapted))
    assert attempt(run) == 0, final(run)
    weight = trained.read(run.path).tensor("layers.0.mlp.up.weight")
    shutil.rmtree(source.path)
    found = trained.read(run.path)
    found.check_base()
    np.testing.assert_array_equal(found.tensor("layers.0.mlp.up.weight"), weight)
