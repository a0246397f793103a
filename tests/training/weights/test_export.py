"""A run's weights leave as a directory that transformers loads, and that comes back as it was."""

import os
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from memconsole.plan.models.configs.families import read_architecture
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.models.pretrained import load
from memconsole_trainer.weights import export
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.initialize import InitialWeights
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
