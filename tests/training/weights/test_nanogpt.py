"""GPT-2 with exact GELU, with and without biases: transformers computes the same logits from an export."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from memconsole.plan import catalog
from memconsole.plan.models.configs.families import read_architecture
from memconsole_trainer.weights import export
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import jax_comparison, torch_comparison
from tests.training.harness.tiny_models import ARCHITECTURES

EXACT = msgspec.structs.replace(ARCHITECTURES["gpt2"], activation="gelu", initializer_range=0.3)


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "none"])
def test_both_backends_and_transformers_compute_the_same_logits(
    biases: bool, tmp_path: Path
) -> None:
    architecture = msgspec.structs.replace(EXACT, biases=biases)
    weights = InitialWeights(architecture, seed=3)
    export.export(architecture, weights, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = np.random.default_rng(0).integers(0, architecture.vocab_size, (2, 24))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    scale = np.abs(expected).max()
    for backend in (torch_comparison, jax_comparison):
        found = backend.logits(architecture, weights, tokens)  # type: ignore[attr-defined]
        assert np.abs(found - expected).max() / scale < 1e-5, backend.__name__
    approximate = msgspec.structs.replace(architecture, activation="gelu_tanh")
    other = torch_comparison.logits(approximate, weights, tokens)
    assert np.abs(other - expected).max() / scale > 1e-5, "the two GELUs differ"
    again = read_architecture(str(tmp_path / "out"))
    assert again == EXACT, "transformers' GPT-2 always has biases"
    read = HuggingFaceWeights(tmp_path / "out", again)
    loaded = torch_comparison.logits(again, read, tokens)
    assert np.abs(loaded - expected).max() / scale < 1e-5


@pytest.mark.parametrize("name", ["nanogpt", "nanogpt-char"])
def test_models_of_nanogpt_have_no_biases_and_exact_gelu(name: str) -> None:
    architecture = catalog.models()[name].architecture
    assert architecture is not None
    assert architecture.activation == "gelu"
    assert not [p.name for p in architecture.parameters() if p.role == "bias"]
