"""Preferences in JAX: the loss of DPO from the log-likelihoods of the answers of each pair."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, uncompiled
from memconsole.plan.tasks.language import MASKED
from memconsole_jax.tasks.language import Language, hidden_states
from memconsole_jax.tasks.task import Evaluation, Loss, Tree
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.techniques.activations.fused_loss import (
    chunked,
    nats_of_rows,
    whole,
)


class Preference(Language):
    """Implements `memconsole_jax.tasks.task.Task`. Rows 0, 2, … are chosen answers, and each is followed by the rejected
    answer of its pair."""

    def weight(self, arrays: Tree) -> Array:
        """Number of pairs that count."""
        return jnp.sum(counted(arrays["targets"]))

    def loss(self, plan: Plan, model: Architecture, disk: Disk | None = None) -> Loss:
        """The head is computed twice: for the log-likelihoods, which the derivatives depend on, and for its gradients."""
        forward, cap = hidden_states(plan, model, disk), model.logit_cap
        nats = chunked if plan.optimize.fused_loss else whole

        def loss(
            trained: Tree,
            frozen: Tree,
            arrays: Tree,
            sums: Tree | None = None,
            share: Array | float = 1.0,
        ) -> Array:
            found, targets = forward({**trained, **frozen}, arrays, sums), arrays["targets"]
            hidden, head = lax.stop_gradient(found.hidden), lax.stop_gradient(found.head)
            own = nats_of_rows(hidden, head, targets, cap)
            pairs = of_pairs(own, targets, arrays["reference"], plan.train.dpo_beta)
            shares = jnp.broadcast_to((pairs.slopes * share)[:, None], targets.shape)
            # Otherwise XLA may hold the logits of both passes at once.
            after, shares = lax.optimization_barrier((found.hidden, shares))
            summed = nats(after, found.head, targets, shares, found.head_gradient_sum, cap)
            value = jnp.sum(pairs.losses) * share
            return summed + lax.stop_gradient(
                value - summed
            )  # `value`, with the gradient of `summed`

        return loss

    def evaluation(self, plan: Plan, model: Architecture) -> Evaluation:
        def evaluation(trained: Tree, frozen: Tree, arrays: Tree) -> Array:
            own = -self.outputs(plan, model, {**trained, **frozen}, arrays)
            found = of_pairs(own, arrays["targets"], arrays["reference"], plan.train.dpo_beta)
            margins = found.chosen - found.rejected
            right = found.counts & (margins > 0)
            sums = found.losses, right, margins, found.chosen, found.rejected
            return jnp.stack([jnp.sum(values) for values in sums])

        return evaluation

    def outputs(self, plan: Plan, model: Architecture, weights: Tree, arrays: Tree) -> Array:
        """The log-likelihood of each row's unmasked targets, float32 (B,)."""
        found = hidden_states(uncompiled(plan), model)(weights, arrays)
        return -nats_of_rows(found.hidden, found.head, arrays["targets"], model.logit_cap)


class Pairs(NamedTuple):
    """What DPO finds of a micro-batch."""

    losses: Array
    """The loss of each pair, float32 (B / 2,)."""
    slopes: Array
    """The derivative of a row's pair's loss with respect to the row's nats (B,)."""
    counts: Array
    """Whether a pair counts (B / 2,)."""
    chosen: Array
    """The reward of the chosen answer of each pair (B / 2,)."""
    rejected: Array


def counted(targets: Array) -> Array:
    """Whether each pair of rows (..., B, T) has a target (..., B / 2). One without is padding."""
    rows = jnp.any(targets != MASKED, -1)
    return jnp.any(rows.reshape(*rows.shape[:-1], -1, 2), -1)


def of_pairs(nats: Array, targets: Array, reference: Array, beta: float) -> Pairs:
    """DPO of rows with these nats (B,), targets (B, T) and log-likelihoods under the reference (B,)."""
    counts = counted(targets)
    rewards = (-beta * (nats + reference)).reshape(-1, 2) * counts[:, None]
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    margins = chosen - rejected
    losses = jax.nn.softplus(-margins) * counts
    pull = beta * jax.nn.sigmoid(-margins) * counts
    slopes = jnp.stack([pull, -pull], -1).reshape(-1)
    return Pairs(losses, slopes, counts, chosen, rejected)


PREFERENCE = Preference()
