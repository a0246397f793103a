"""Regression on windows in JAX: masked squared error of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, uncompiled
from memconsole_jax.models import dropout
from memconsole_jax.models.regressor import assemble
from memconsole_jax.tasks.task import Evaluation, Head, Loss, Tree
from memconsole_jax.techniques import compilation
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.techniques.weights import precision


class Regression:
    """Implements `memconsole_jax.tasks.task.Task`."""

    def weight(self, arrays: Tree) -> Array:
        """Number of unmasked outputs."""
        return jnp.sum(arrays["mask"])

    def loss(self, plan: Plan, model: Regressor, disk: Disk | None = None) -> Loss:
        outputs = _outputs(plan, model, disk)

        def loss(
            trained: Tree,
            frozen: Tree,
            arrays: Tree,
            sums: Tree | None = None,
            share: Array | float = 1.0,
        ) -> Array:
            missed = outputs({**trained, **frozen}, arrays, sums) - arrays["targets"]
            return jnp.sum(arrays["mask"] * jnp.square(missed)) * share

        return loss

    def evaluation(self, plan: Plan, model: Regressor) -> Evaluation:
        outputs = _outputs(uncompiled(plan), model)

        def evaluation(trained: Tree, frozen: Tree, arrays: Tree) -> Array:
            missed = outputs({**trained, **frozen}, arrays) - arrays["targets"]
            mask = arrays["mask"]
            squares, absolute = mask * jnp.square(missed), mask * jnp.abs(missed)
            each = (jnp.sum(squares, axis=0), jnp.sum(absolute, axis=0))
            return jnp.concatenate([jnp.sum(squares)[None], *each])

        return evaluation

    def head(self, weights: Iterable[str]) -> Head | None:
        """None, because the head is small. Its gradients are summed like those of the other
        weights."""
        return None

    def sampler(self, plan: Plan, model: Regressor, weights: Any, place: Any) -> None:
        return None

    def outputs(self, plan: Plan, model: Regressor, weights: Tree, arrays: Tree) -> Array:
        """(B, outputs) of windows (B, T, features)."""
        return _outputs(uncompiled(plan), model)(weights, arrays)


def _outputs(plan: Plan, model: Regressor, disk: Disk | None = None) -> Callable[..., Array]:
    """(weights, arrays, sums or None) -> outputs (B, outputs)."""
    dtype, running = precision.compute_dtype(plan), compilation.running(plan, disk)
    rates = dropout.Rates.of(plan)

    def outputs(weights: Tree, arrays: Tree, sums: Tree | None = None) -> Array:
        with dropout.active(rates, arrays.get(dropout.BITS)):
            outputs: Array = assemble(model, weights)(arrays["windows"], dtype, running, sums)
        return outputs

    return outputs


REGRESSION = Regression()
