"""torch and JAX compute the same model: logits and gradients from the same weights and rows."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch

from memconsole.plan.architecture import Architecture, parameters
from memconsole_torch import engine as torch_engine
from memconsole_trainer.initialize import generator

pytest.importorskip("jax")
from memconsole_jax import engine as jax_engine

torch.set_num_threads(1)


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


@pytest.mark.parametrize("kind", ["gpt2", "llama-scaled", "qwen3", "gemma", "gemma3"])
def test_both_backends_give_the_same_logits_and_gradients(kind: str) -> None:
    architecture = tiny_models.ARCHITECTURES[kind]
    weights = RandomWeights(architecture)
    batch = tiny_models.batch(2, 2, 24, masked=0.3)
    batch.targets[1, 0] = -100  # the micro-batches differ in their number of targets

    ours = torch_engine.logits(architecture, weights, batch.inputs[0])
    theirs = jax_engine.logits(architecture, weights, batch.inputs[0])
    assert relative_error(ours, theirs) <= 1e-4

    gradients = torch_engine.gradients(architecture, weights, batch)
    others = jax_engine.gradients(architecture, weights, batch)
    assert set(gradients) == set(others) == {p.name for p in parameters(architecture) if p.used}
    for name, gradient in gradients.items():
        expected = np.asarray(others[name])
        # A key's bias moves every score of a row alike: its true gradient is 0.
        bound = 1e-6 if name.endswith("key.bias") else 1e-4 * np.abs(expected).max()
        assert np.abs(gradient - expected).max() <= bound, name
