"""Recommendation in JAX: the two-level softmax of the next item."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, uncompiled
from memconsole.plan.tasks.recommendation import PADDING
from memconsole_jax.models import dropout
from memconsole_jax.models.recommender import Projected, assemble
from memconsole_jax.tasks.task import Evaluation, Loss, Tree
from memconsole_jax.techniques import compilation
from memconsole_jax.techniques.activations import two_level
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.techniques.weights import precision
from memconsole_jax.techniques.weights.lora import equipped


class Recommendation:
    """Implements `memconsole_jax.tasks.task.Task`."""

    def weight(self, arrays: Tree) -> Array:
        """Number of targets that count."""
        return jnp.sum(arrays["targets"] != PADDING)

    def loss(self, plan: Plan, model: Recommender, disk: Disk | None = None) -> Loss:
        forward = _forward(plan, model, disk)

        def loss(
            trained: Tree,
            frozen: Tree,
            arrays: Tree,
            sums: Tree | None = None,
            share: Array | float = 1.0,
        ) -> Array:
            projected = forward({**trained, **frozen}, arrays, sums)
            return two_level.nats(model, projected, arrays["targets"]) * share

        return loss

    def evaluation(self, plan: Plan, model: Recommender) -> Evaluation:
        """Nats, then the measures of the ranking of all items."""
        forward = _forward(uncompiled(plan), model)

        def evaluation(trained: Tree, frozen: Tree, arrays: Tree) -> Array:
            projected = forward({**trained, **frozen}, arrays)
            return two_level.ranked(model, projected, arrays["targets"])

        return evaluation

    def head(self, weights: Iterable[str]) -> None:
        """None: gradients of the table and the adapter are summed after each micro-batch."""
        return None

    def sampler(self, plan: Plan, model: Recommender, weights: Any, place: Any) -> None:
        return None

    def outputs(self, plan: Plan, model: Recommender, weights: Tree, arrays: Tree) -> Array:
        """log P of every item after the last one of each row (B, C · M)."""
        projected = _forward(uncompiled(plan), model)(weights, arrays)
        last = jnp.maximum(jnp.sum(arrays["items"] != PADDING, axis=1) - 1, 0)
        hidden = jnp.take_along_axis(projected.hidden, last[:, None, None], axis=1)[:, 0]
        return two_level.scores(model, projected._replace(hidden=hidden))


def _forward(plan: Plan, model: Recommender, disk: Disk | None = None) -> Callable[..., Projected]:
    """(weights, arrays, sums or None) -> `Projected`."""
    dtype, running = precision.compute_dtype(plan), compilation.running(plan, disk)
    rates = dropout.Rates.of(plan)

    def forward(weights: Tree, arrays: Tree, sums: Tree | None = None) -> Projected:
        module = equipped(assemble(model, weights), model, weights)
        with dropout.active(rates, arrays.get(dropout.BITS)):
            projected: Projected = module(arrays["items"], dtype, running, sums)
        return projected

    return forward


RECOMMENDATION = Recommendation()
