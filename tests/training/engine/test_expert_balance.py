"""The loss that spreads tokens over experts, in both backends."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from memconsole.plan.plan import Plan, replace
from memconsole_jax import engine as jax_engine
from memconsole_jax.models import balance
from memconsole_torch import engine as torch_engine
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

torch.set_num_threads(1)
MODEL = tiny_models.ARCHITECTURES["qwen3_moe"]
STEPS = 4


def test_jax_adds_the_gradient_of_the_loss_to_that_of_the_outputs() -> None:
    logits = jax.random.normal(jax.random.key(0), (2, 9, 8))
    plan = replace(Plan(), {"train.expert_balance": 0.3})

    def plain(logits: Any) -> Any:
        return jnp.sum(jnp.sin(logits))

    def with_loss(logits: Any) -> Any:
        scores = jax.nn.softmax(logits, -1).reshape(-1, 8)
        picks = jax.lax.top_k(logits, 3)[1].reshape(-1, 3)
        goes = jax.nn.one_hot(picks, 8).sum(1).mean(0)
        return plain(logits) + 2.0 * 0.3 / MODEL.layers * 8 * jnp.sum(goes * scores.mean(0))

    with balance.balancing(balance.weight_of(plan, MODEL, 2.0)):
        value, found = jax.value_and_grad(lambda x: plain(balance.balanced(x, 3)))(logits)
    np.testing.assert_allclose(value, plain(logits))
    np.testing.assert_allclose(found, jax.grad(with_loss)(logits), rtol=1e-5, atol=1e-7)


@cache
def losses(backend: str, weight: float, precision: str = "fp32", parts: int = 2) -> list[float]:
    """The losses of a few steps of 4 rows."""
    plan = replace(
        Plan(),
        {
            "backend": backend,
            "device.name": "cpu",
            "data.sequence_length": 24,
            "train.batch_size": 4 // parts,
            "train.learning_rate": 0.01,
            "train.schedule": "constant",
            "train.warmup_steps": 0,
            "train.weight_decay": 0.0,
            "train.expert_balance": weight,
            "optimize.accumulation_steps": parts,
            "optimize.precision": precision,
        },
    )
    engine: Any = (torch_engine if backend == "torch" else jax_engine).create(plan, None)
    engine.build(plan, MODEL, STEPS, InitialWeights(MODEL, 0))
    for step in range(STEPS):
        engine.train_step(tiny_models.batch(parts, 4 // parts, 24, seed=step))
    return [metrics.loss for metrics in engine.take_metrics()]


def test_both_backends_train_alike_with_it() -> None:
    ours, theirs = losses("torch", 0.5), losses("jax", 0.5)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    plain = losses("torch", 0.0)
    assert ours[0] == pytest.approx(plain[0], rel=1e-6)  # it is not part of the loss that is told
    assert abs(ours[-1] - plain[-1]) > 2e-4


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_scaled_loss_scales_it_too(backend: str) -> None:
    found, wide = losses(backend, 0.5, "fp16"), losses(backend, 0.5)
    without = losses(backend, 0.0)
    assert abs(found[-1] - wide[-1]) < 0.3 * abs(without[-1] - wide[-1])
