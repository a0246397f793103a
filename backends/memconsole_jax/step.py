"""The compiled functions of training: one optimizer step, and the loss of one evaluation batch.

Weights are flat dicts of stacked arrays; `trained` are differentiated, `kept` are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole_jax import checkpointing, offload, precision
from memconsole_jax.fused_loss import MASKED, chunked_nats, plain_nats
from memconsole_jax.lora import assembled
from memconsole_jax.optimizers import clip_factor

Tree = dict[str, Array]
Loss = Callable[[Tree, Tree, Array, Array], Array]


class Trained(NamedTuple):
    """What a step replaces, donated to it."""

    weights: Tree
    optimizer: Any


def summed_loss(plan: Plan, architecture: Architecture, *, chunked: bool) -> Loss:
    """Summed nats of one micro-batch: (trained, kept, inputs (B, T), targets (B, T)) -> scalar."""
    dtype = precision.compute_dtype(plan)
    around = checkpointing.around(plan.optimize.gradient_checkpointing)
    nats = chunked_nats if chunked else plain_nats

    def loss(trained: Tree, kept: Tree, inputs: Array, targets: Array) -> Array:
        decoder = assembled(architecture, {**trained, **kept})
        return nats(decoder.hidden(inputs, dtype, around), decoder.head_weight, targets)

    return loss


def mean_gradients(
    loss: Loss, trained: Tree, kept: Tree, inputs: Array, targets: Array
) -> tuple[Array, Tree]:
    """Mean nats over all unmasked targets (A, B, T), and its float32 gradients.

    Micro-batches run one after another; each contributes its sum divided by the count of the whole
    effective batch, so the result does not depend on how the rows were cut.
    """
    share = 1.0 / jnp.maximum(jnp.sum(targets != MASKED), 1).astype(jnp.float32)

    def one(inputs: Array, targets: Array) -> tuple[Array, Tree]:
        return jax.value_and_grad(lambda w: loss(w, kept, inputs, targets) * share)(trained)

    if inputs.shape[0] == 1:
        return one(inputs[0], targets[0])

    def add(total: tuple[Array, Tree], rows: tuple[Array, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(*rows)), None

    zero = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
    total, _ = lax.scan(add, (jnp.float32(0.0), zero), (inputs, targets))
    return total


def train_step(
    plan: Plan,
    architecture: Architecture,
    transformation: optax.GradientTransformation,
    places: tuple[Any, Any] | None = None,
) -> Any:
    """Jitted (Trained, kept, inputs (A, B, T), targets, rate) -> Trained and [loss, gradient norm]; donates
    the first argument. `places`: the device and its host memory, where the optimizer's state waits there."""
    loss = summed_loss(plan, architecture, chunked=plan.optimize.fused_loss)

    def step(
        state: Trained, kept: Tree, inputs: Array, targets: Array, rate: Array
    ) -> tuple[Trained, Array]:
        mean, gradients = mean_gradients(loss, state.weights, kept, inputs, targets)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        factor = clip_factor(norm, plan.train.grad_clip)
        gradients = jax.tree.map(lambda g: g * factor, gradients)
        before = state.optimizer if places is None else offload.moved(state.optimizer, places[0])
        updates, optimizer = transformation.update(gradients, before, state.weights)
        optimizer = optimizer if places is None else offload.moved(optimizer, places[1])
        weights = jax.tree.map(lambda w, u: w - rate * u, state.weights, updates)
        return Trained(weights, optimizer), jnp.stack([mean, norm])

    return jax.jit(step, donate_argnums=0)


def evaluation_step(plan: Plan, architecture: Architecture) -> Any:
    """Jitted (sums, trained, kept, inputs (B, T), targets) -> sums with this batch's nats added.

    `sums` is [total, rounding lost] (Kahan 1965), so that millions of tokens add up in float32. The
    loss is always chunked: evaluation never needs more memory than training.
    """
    loss = summed_loss(plan, architecture, chunked=True)

    def step(sums: Array, trained: Tree, kept: Tree, inputs: Array, targets: Array) -> Array:
        total, lost = sums
        nats = loss(trained, kept, inputs, targets) - lost
        new = total + nats
        return jnp.stack([new, (new - total) - nats])

    return jax.jit(step)
