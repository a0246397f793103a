"""The JAX backend's update rules, each against an independent reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
import torch

from memconsole.plan.plan import Plan, replace
from memconsole_jax.layout.stacking import Stack, stacks
from memconsole_jax.techniques.optimizer.optimizers import clip_factor, transformation
from memconsole_jax.techniques.optimizer.slices import in_slices
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

ARCHITECTURE = msgspec.structs.replace(tiny_models.ARCHITECTURES["gpt2"], layers=2)
RATES = (1e-3, 5e-3, 2e-3, 1e-2, 3e-3, 3e-3)
DECAY = 0.1


def trajectory(name: str) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """Canonical weights after each step, and the gradients of each step (some tiny, some huge)."""
    plan = replace(Plan(), {"optimize.optimizer": name, "train.weight_decay": DECAY})
    rule = transformation(plan, ARCHITECTURE)
    found = stacks(ARCHITECTURE)
    source = InitialWeights(ARCHITECTURE, 0)
    weights = {n: jnp.asarray(s.gather(source.tensor)) for n, s in found.items()}
    state = rule.init(weights)
    random = np.random.default_rng(0)
    history, slopes = [canonical(found, weights)], []

    @jax.jit
    def step(weights: Any, state: Any, gradients: Any, rate: Any) -> Any:
        updates, state = rule.update(gradients, state, weights)
        return jax.tree.map(lambda w, u: w - rate * u, weights, updates), state

    for rate in RATES:
        gradients = {
            n: jnp.asarray(
                random.normal(size=w.shape) * 10.0 ** random.uniform(-6, 1, w.shape), jnp.float32
            )
            for n, w in weights.items()
        }
        weights, state = step(weights, state, gradients, np.float32(rate))
        history.append(canonical(found, weights))
        slopes.append(canonical(found, gradients))
    return history, slopes


def canonical(found: dict[str, Stack], arrays: Any) -> dict[str, np.ndarray]:
    return {n: row for s, x in arrays.items() for n, row in found[s].split(np.array(x))}


DECAYS = {p.name: p.decays for s in stacks(ARCHITECTURE).values() for p in s.members}


def torch_rule(make: Callable[..., torch.optim.Optimizer], slopes: Any, start: Any) -> Any:
    """Each step's weights by a torch optimizer, decay on matrices and embeddings only."""
    own = {n: torch.nn.Parameter(torch.from_numpy(x.copy())) for n, x in start.items()}
    groups = [
        {"params": [p for n, p in own.items() if DECAYS[n] is flag], "weight_decay": decay}
        for flag, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = make(groups)
    for rate, slope in zip(RATES, slopes, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for n, p in own.items():
            p.grad = torch.from_numpy(slope[n])
        optimizer.step()
        yield {n: p.detach().numpy().copy() for n, p in own.items()}


TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, eps=(1e-30, 1e-3)),
}


@pytest.mark.parametrize("name", TORCH)
def test_each_step_is_torchs_own(name: str) -> None:
    history, slopes = trajectory(name)
    for step, expected in enumerate(torch_rule(TORCH[name], slopes, history[0]), 1):
        for n in expected:
            np.testing.assert_allclose(
                history[step][n], expected[n], atol=1e-6, rtol=2e-6, err_msg=f"{n} at {step}"
            )


def test_lion_is_the_papers_algorithm_2() -> None:
    history, slopes = trajectory("lion")
    for n in DECAYS:
        weight = history[0][n].astype(np.float64)
        momentum = np.zeros_like(weight)
        for step, (rate, slope) in enumerate(zip(RATES, slopes, strict=True), 1):
            update = np.sign(0.9 * momentum + 0.1 * slope[n])
            weight = weight - rate * (update + (DECAY if DECAYS[n] else 0.0) * weight)
            momentum = 0.95 * momentum + 0.05 * slope[n]
            np.testing.assert_allclose(history[step][n], weight, atol=1e-6)


def test_lion_in_slices_is_lion_without_a_copy_of_the_momentum() -> None:
    """XLA's plan of the update: the gradients, and no more than some slices."""
    whole = optax.scale_by_lion(0.9, 0.99)
    shapes = {"w": (4, 96, 640), "table": (1000, 128)}
    start = {n: jnp.linspace(-1, 1, math.prod(s)).reshape(s) for n, s in shapes.items()}

    def stepped(rule: optax.GradientTransformation, weights: Any, state: Any) -> Any:
        gradients = jax.tree.map(lambda w: jnp.cos(9 * w), weights)
        updates, state = rule.update(gradients, state, weights)
        return jax.tree.map(lambda w, u: w - 0.01 * u, weights, updates), state

    found, needed = [], []
    for rule in (in_slices(whole, {"w"}, 5000), whole):
        step = jax.jit(partial(stepped, rule), donate_argnums=(0, 1))
        plan = step.lower(start, rule.init(start)).compile().memory_analysis()
        needed.append(plan.temp_size_in_bytes)
        after = jax.tree.map(jnp.copy, start), rule.init(start)
        for _ in range(3):
            after = step(*after)
        found.append(after)
    for own, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-7)
    gradients = 4 * sum(math.prod(s) for s in shapes.values())
    assert needed[0] < 1.3 * gradients < needed[1]


def test_weight_decay_never_touches_norms_and_biases() -> None:
    """With no gradient AdamW shrinks matrices by rate · decay and leaves the rest alone."""
    rule = transformation(replace(Plan(), {"train.weight_decay": DECAY}), ARCHITECTURE)
    weights = {n: jnp.ones(s.shape) for n, s in stacks(ARCHITECTURE).items()}
    nothing = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = rule.update(nothing, rule.init(weights), weights)
    for name, stack in stacks(ARCHITECTURE).items():
        kind = stack.members[0].role
        expected = 0.0 if kind in ("norm", "bias") else DECAY
        np.testing.assert_allclose(updates[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("norm", "most", "factor"),
    [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (9.0, 0.0, 1.0)],
)
def test_clipping_scales_down_to_the_limit_only(norm: float, most: float, factor: float) -> None:
    assert float(clip_factor(jnp.float32(norm), most)) == factor


def test_adafactor_keeps_rows_and_columns_of_each_layer_by_itself() -> None:
    rule = transformation(replace(Plan(), {"optimize.optimizer": "adafactor"}), ARCHITECTURE)
    weights = {
        n: jax.ShapeDtypeStruct(s.shape, jnp.float32) for n, s in stacks(ARCHITECTURE).items()
    }
    state = jax.eval_shape(rule.init, weights)
    total = sum(x.size for x in jax.tree.leaves(weights))
    assert sum(x.size for x in jax.tree.leaves(state)) < total / 5
