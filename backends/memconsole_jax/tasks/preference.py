"""Preferences in JAX: the losses of DPO, ORPO and SimPO from the log-likelihoods of the answers of each pair."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, uncompiled
from memconsole.plan.sections.train import TrainChoice
from memconsole.plan.tasks.language import MASKED
from memconsole.plan.tasks.preference import LEAST_SHARE, weight_and_gamma
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
    answer of its pair. The formulas are those of `memconsole.plan.tasks.preference`. ORPO and SimPO compare no pair of which
    an answer has no target."""

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
            pairs = of_pairs(plan.train, own, targets, arrays.get("reference"))
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
            found = of_pairs(plan.train, own, arrays["targets"], arrays.get("reference"))
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
    """What the pairs of a micro-batch are worth."""

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


def of_pairs(t: TrainChoice, nats: Array, targets: Array, reference: Array | None) -> Pairs:
    """What the pairs of rows with these nats (B,) and targets (B, T) are worth. `reference` are the log-likelihoods under the
    reference (B,), if the objective has one."""
    lengths = jnp.sum(targets != MASKED, -1).reshape(-1, 2)
    answered = lengths > 0
    counts = jnp.any(answered, -1)
    growth: Array | float
    if reference is not None:
        compared, growth = counts, t.dpo_beta
        rewards = (-growth * (nats + reference)).reshape(-1, 2)
    else:
        compared, tokens = jnp.all(answered, -1), jnp.maximum(lengths, 1)
        means = nats.reshape(-1, 2) / tokens
        if t.objective == "simpo":
            rewards, growth = -t.simpo_beta * means, t.simpo_beta / tokens
        else:
            # The probability of all other answers, and how fast the log odds grow with the mean log-likelihood.
            others = -jnp.expm1(-means)
            steepness = jnp.where(others > LEAST_SHARE, 1 / others, 1.0)
            rewards = -means - jnp.log(jnp.maximum(others, LEAST_SHARE))
            growth = steepness / tokens
    rewards *= compared[:, None]
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    margins = chosen - rejected
    weight, gamma = weight_and_gamma(t)
    losses = weight * jax.nn.softplus(gamma - margins) * compared
    pull = weight * jax.nn.sigmoid(gamma - margins) * compared
    slopes = jnp.stack([pull, -pull], -1) * growth
    if t.objective == "orpo":
        losses += means[:, 0] * answered[:, 0]
        slopes = slopes.at[:, 0].add(answered[:, 0] / tokens[:, 0])
    return Pairs(losses, slopes.reshape(-1), counts, chosen, rejected)


PREFERENCE = Preference()
