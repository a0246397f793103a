"""A run's weights leave as a directory that transformers loads, and that comes back as it was."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from memconsole.plan.models.architecture import RopeScaling
from memconsole.plan.models.configs.families import read_architecture
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.run_store import create_run
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.models.pretrained import load
from memconsole_trainer.weights import export
from memconsole_trainer.weights.export_run import _base_name, source_dtype
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.initialize import InitialWeights
from memconsole_trainer.weights.trained import read
from tests.training.harness.runs import attempt, plan
from tests.training.harness.tiny_models import ARCHITECTURES


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_transformers_computes_the_same_logits_from_an_export(kind: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[kind]
    weights = InitialWeights(msgspec.structs.replace(architecture, initializer_range=0.3), seed=3)
    export.export(architecture, weights, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.randint(architecture.vocab_size, (2, 40), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        make = partial(Decoder, architecture)
        found = load(architecture, make, weights, torch.device("cpu")).logits(tokens)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_an_exported_configuration_describes_the_same_architecture(
    kind: str, tmp_path: Path
) -> None:
    architecture = ARCHITECTURES[kind]
    weights = InitialWeights(architecture, seed=0)
    export.export(architecture, weights, tmp_path)
    assert read_architecture(str(tmp_path)) == architecture


def test_a_scaled_gemma_3_is_scaled_for_both_spellings_of_transformers(tmp_path: Path) -> None:
    scaling = RopeScaling(kind="linear", factor=8.0)
    architecture = msgspec.structs.replace(ARCHITECTURES["gemma3"], rope_scaling=scaling)
    export.export(architecture, InitialWeights(architecture, seed=0), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    linear = {"rope_type": "linear", "factor": 8.0}
    assert config["rope_scaling"] == linear
    assert linear.items() <= config["rope_parameters"]["full_attention"].items()
    assert config["rope_parameters"]["sliding_attention"]["rope_type"] == "default"
    assert read_architecture(str(tmp_path)) == architecture


def test_the_type_of_exported_weights_is_that_of_the_base(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama"]
    export.export(architecture, InitialWeights(architecture, 0), tmp_path, "bfloat16")
    config = json.loads((tmp_path / "config.json").read_text())
    plan = replace(Plan(), {"model.name": str(tmp_path)})
    found = [source_dtype(SimpleNamespace(plan=plan))]  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if "dtype" not in key})
    )
    found.append(source_dtype(SimpleNamespace(plan=plan)))  # type: ignore[arg-type]
    assert found == ["bfloat16", "bfloat16"]


def test_adapters_name_a_model_of_the_hub_by_its_id(tmp_path: Path) -> None:
    assert _base_name("owner/name", "/cache/models--owner--name/snapshots/1") == "owner/name"
    assert _base_name(str(tmp_path), str(tmp_path)) == str(tmp_path)


def test_a_run_is_read_as_it_was_trained_whatever_became_of_its_files(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    short = {"train__max_steps": 1, "train__epochs": 1}
    first = create_run(plan(text, **short))
    assert attempt(first) == 0
    vocabulary, base = tmp_path / "tokenizer.json", tmp_path / "base"
    shutil.copyfile(first.path / "tokenizer.json", vocabulary)
    architecture = msgspec.structs.replace(ARCHITECTURES["llama"], vocab_size=300)
    export.export(architecture, InitialWeights(architecture, 0), base)
    shutil.copyfile(vocabulary, base / "tokenizer.json")
    own = {"model__target_params": None, "data__vocab_size": None}
    trained_on = create_run(plan(text, model__name=str(base), **own, **short))
    given = create_run(plan(text, data__tokenizer=str(vocabulary), data__vocab_size=None, **short))
    assert attempt(trained_on) == attempt(given) == 0
    whole = read(given.path).model
    vocabulary.unlink()
    assert read(given.path).model == whole
    assert "warning" not in capsys.readouterr().err
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert read(trained_on.path).architecture == architecture
    assert "describes another model than when" in capsys.readouterr().err


def test_large_weights_go_into_shards_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 8_000)
    architecture = ARCHITECTURES["llama"]
    export.export(architecture, InitialWeights(architecture, 0), tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    assert "model.safetensors.index.json" in names
    assert sum(name.endswith(".safetensors") for name in names) > 2
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_export_tells_whether_rounding_changed_a_weight(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama"]
    narrow, wide = tmp_path / "narrow", InitialWeights(architecture, 0)
    assert export.export(architecture, wide, narrow, "bfloat16")
    weights = HuggingFaceWeights(narrow, architecture)
    assert not export.export(architecture, weights, tmp_path / "same", "bfloat16")
    assert not export.export(architecture, weights, tmp_path / "wide")


def test_others_may_read_the_weights_of_an_export_as_its_other_files(tmp_path: Path) -> None:
    architecture, before = ARCHITECTURES["llama"], os.umask(0o027)
    try:
        export.export(architecture, InitialWeights(architecture, 0), tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), "0o640")
