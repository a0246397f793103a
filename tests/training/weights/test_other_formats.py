"""A directory whose weights are not safetensors is refused, with the command that converts it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from memconsole.plan import catalog
from memconsole.plan.models.files import check_weights, conversion
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.record.failures.failure import ExitCode
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.weights.trained import starting_weights
from tests.training.harness.runs import attempt, plan, told

torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tests.training.harness.tiny_models")


def test_weights_in_a_pickle_are_refused_and_the_command_that_is_told_converts_them(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "a model"
    oracle = tiny_models.save("llama", folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save(oracle.state_dict(), folder / "pytorch_model.bin")
    run = create_run(
        plan(text, model__name=str(folder), model__target_params=None, data__vocab_size=None)
    )
    assert attempt(run) == ExitCode.BAD_PLAN
    (error,) = told(run, events.Error)
    assert error.message.startswith(f"{folder} holds its weights as pytorch_model.bin")
    with pytest.raises(PlanError, match=r"pytorch_model\.bin; only safetensors") as refused:
        check_weights(folder)
    command = conversion(folder)
    assert str(refused.value).endswith(command)
    _, option, program, where = shlex.split(command)
    assert option == "-c"
    monkeypatch.setattr(sys, "argv", ["-c", where])
    exec(program, {})
    check_weights(folder)
    named = replace(Plan(), {"model.name": str(folder)})
    found = starting_weights(named, catalog.model(named)).tensor("embedding.weight")
    np.testing.assert_array_equal(found, oracle.state_dict()["model.embed_tokens.weight"].numpy())


def test_a_directory_without_weights_starts_from_new_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(b"")
    check_weights(tmp_path)
