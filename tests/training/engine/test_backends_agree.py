"""torch and JAX compute the same model: logits and gradients from the same weights and rows."""

from __future__ import annotations

from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import torch

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan, replace
from memconsole_jax import engine as jax_engine
from memconsole_jax.models import decoder as jax_decoder
from memconsole_torch import engine as torch_engine
from memconsole_torch.models import norms as torch_norms
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Engine, WeightsError
from memconsole_trainer.randomness import generator
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import jax_comparison, tiny_models, torch_comparison
from tests.training.harness.adapted import State

torch.set_num_threads(1)

LLAMA = tiny_models.ARCHITECTURES["llama"]
SETTINGS = {"device.name": "cpu", "data.sequence_length": 12, "train.batch_size": 2}


class RandomWeights:
    """Every tensor far from its initial value, norms and biases included."""

    def __init__(self, architecture: Architecture) -> None:
        self._fills = {p.name: (p.shape, p.fill) for p in parameters(architecture)}

    def tensor(self, name: str) -> np.ndarray:
        shape, fill = self._fills[name]
        noise = generator(3, name).standard_normal(shape, dtype=np.float32)
        return np.float32(fill) + np.float32(0.2) * noise


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        "gpt_neox",
        "llama-scaled",
        "qwen3",
        "granite",
        "olmo2",
        "gemma",
        "gemma2",
        "gemma3",
        "ministral3",
        "exaone4-windows",
        "glm4",
        "starcoder2",
    ],
)
def test_both_backends_give_the_same_logits_and_gradients(kind: str) -> None:
    architecture = tiny_models.ARCHITECTURES[kind]
    weights = RandomWeights(architecture)
    batch = tiny_models.batch(2, 2, 24, masked=0.3)
    batch["targets"][1, 0] = -100  # the micro-batches differ in their number of targets
    batch = language_batch(batch["inputs"], batch["targets"])

    ours = torch_comparison.logits(architecture, weights, batch["inputs"][0])
    theirs = jax_comparison.logits(architecture, weights, batch["inputs"][0])
    assert relative_error(ours, theirs) <= 1e-4

    gradients = torch_comparison.gradients(architecture, weights, batch)
    others = jax_comparison.gradients(architecture, weights, batch)
    assert set(gradients) == set(others) == {p.name for p in parameters(architecture) if p.used}
    for name, gradient in gradients.items():
        expected = np.asarray(others[name])
        # A key's bias moves every score of a row alike: its true gradient is 0.
        bound = 1e-6 if name.endswith("key.bias") else 1e-4 * np.abs(expected).max()
        assert np.abs(gradient - expected).max() <= bound, name


@pytest.mark.parametrize(("kind", "middle"), [("gpt2", 100.0), ("llama", 0.0)])
def test_the_statistics_of_a_norm_are_float32s_whatever_it_reads(kind: str, middle: float) -> None:
    """Layer norm of values far from 0 beside their spread, RMS norm of ones of any size, both in bf16."""
    a = tiny_models.ARCHITECTURES[kind]
    spread = generator(5, kind).standard_normal((7, a.hidden_size), dtype=np.float32)
    x = torch.from_numpy(middle + spread * (4.0 if middle else 1e-2)).bfloat16()
    wide = x.double().numpy()
    if a.norm == "layernorm":
        wide = wide - wide.mean(-1, keepdims=True)
    expected = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + a.norm_eps)

    ours = torch_norms.Norm(a, a.hidden_size)
    ours.weight.data.fill_(1.0 - a.norm_unit_offset)
    if ours.bias is not None:
        ours.bias.data.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        found = [ours(x).detach().float().numpy()]
    theirs = jax_decoder.build_norm(a, a.hidden_size)
    theirs.weight[...] = jax.numpy.full((a.hidden_size,), 1.0 - a.norm_unit_offset)
    narrow = jax.numpy.asarray(x.float().numpy()).astype(jax.numpy.bfloat16)
    found.append(np.asarray(theirs(narrow), np.float32))
    for result in found:
        np.testing.assert_allclose(result, expected, rtol=2**-8, atol=1e-5)


def test_a_weight_beside_one_that_was_gathered_in_16_bits_is_not_rounded_away() -> None:
    """fsdp gathers weights in 16 bits; Gemma's norm multiplies by one more than its weight."""
    a = msgspec.structs.replace(tiny_models.ARCHITECTURES["llama"], norm_unit_offset=True)
    x = torch.randn(3, a.hidden_size)
    norm = torch_norms.Norm(a, a.hidden_size)
    norm.weight.data.zero_()
    plain = norm(x)
    norm.weight = torch.nn.Parameter(torch.full((a.hidden_size,), 0.003).bfloat16())
    torch.testing.assert_close(norm(x) / plain, torch.full_like(plain, 1.003), rtol=1e-4, atol=0)


def fresh(backend: str, **optimize: Any) -> Engine:
    changes = {f"optimize.{key}": value for key, value in optimize.items()}
    plan = replace(Plan(), {**SETTINGS, **changes, "backend": backend})
    engine: Engine = (torch_engine if backend == "torch" else jax_engine).create(plan, None)
    engine.build(plan, LLAMA, 4, InitialWeights(LLAMA, 0))
    return engine


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_state_of_another_model_or_optimizer_is_refused_by_name(backend: str) -> None:
    engine = fresh(backend)
    state = State(engine)
    with pytest.raises(WeightsError, match=r"unexpected optimizer\."):
        fresh(backend, optimizer="sgd").load_state(state)
    with pytest.raises(WeightsError, match=r"lacks optimizer\."):
        fresh(backend, precision="fp16").load_state(state)
    (moment, *_) = (n for n in state.names() if n.startswith("optimizer.") and "query" in n)
    whole = state.tensors[moment]
    state.tensors[moment] = whole[:1]
    with pytest.raises(WeightsError, match=rf"{moment}: shape"):
        fresh(backend).load_state(state)
    state.tensors[moment] = whole
    engine.load_state(state)
    del state.tensors["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"lacks model\.norm\.weight"):
        engine.load_state(state)
