"""The compiled functions of training: one optimizer step, whole or in two halves, and one
evaluation batch.

Weights are flat dicts of stacked arrays. Only the `trained` ones are differentiated; the `frozen` ones are all others, also
those that the loss does not depend on.
The arrays of a batch are a dict with the names and shapes that the task defines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import EIGHT_BIT
from memconsole_jax import tasks
from memconsole_jax.models.balance import balancing, weight_of
from memconsole_jax.tasks.task import Loss, Task, Tree
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.techniques.optimizer.optimizers import clip_factor, is_sliced
from memconsole_jax.techniques.weights.average import followed
from memconsole_jax.techniques.weights.lora import is_adapter
from memconsole_jax.techniques.weights.precision import adapted
from memconsole_jax.techniques.weights.rounding import Rounding
from memconsole_trainer.schedule import summed_batches
from memconsole_trainer.techniques.compressed import is_compressed
from memconsole_trainer.techniques.loss_scale import is_scaled


class TrainState(NamedTuple):
    """The arrays that a step replaces. They are donated to it."""

    weights: Tree
    optimizer: Any
    precision: Any = None
    """With fp16, the state (3,) of the loss scale; with bf16-sr, the number of the step."""
    average: Any = None
    """The average of the weights in float32, if the plan has one."""


def mean_gradients(
    task: Task, loss: Loss, trained: Tree, frozen: Tree, arrays: Tree, scale: Array | float = 1.0
) -> tuple[Array, Tree]:
    """The loss of all `arrays` (A, B, ...) divided by their weight, times `scale`, and its
    gradients. Gradients are float32 if they are summed over micro-batches, else in the weights'
    dtypes.

    Micro-batches run one after another. Each contributes its sum divided by the weight of the whole
    effective batch, so the result does not depend on how rows are divided into micro-batches.
    Gradients of the blocks and of the task's head are summed inside the backward pass, those of
    other weights after it.
    """
    share = scale / jnp.maximum(task.weight(arrays), 1).astype(jnp.float32)
    if len(jax.tree.leaves(arrays)[0]) == 1:
        own = {name: array[0] for name, array in arrays.items()}
        return jax.value_and_grad(lambda w: loss(w, frozen, own, None, share))(trained)
    head = task.head(trained | frozen)
    inside = {n: w for n, w in trained.items() if is_block(n) or (head and n == head.name)}
    outside = {
        n: w
        for n, w in trained.items()
        if n not in inside or (head and head.shared and n == head.name)
    }

    def of_one(outside: Tree, sums: Tree, own: Tree) -> Array:
        return loss({**inside, **outside}, frozen, own, sums or None, share)

    def add(total: tuple[Array, Tree], own: Tree) -> tuple[Any, None]:
        value, sums = total
        begun = {n: sums[n] for n in inside}
        more, (gradients, added) = jax.value_and_grad(of_one, (0, 1))(outside, begun, own)
        sums = sums | added
        return (value + more, sums | {n: sums[n] + g for n, g in gradients.items()}), None

    zeros = {n: jnp.zeros(w.shape, jnp.float32) for n, w in trained.items()}
    return lax.scan(add, (jnp.float32(0.0), zeros), arrays)[0]


def is_block(name: str) -> bool:
    """Whether a trained array is a weight of the blocks, and not of an adapter."""
    return name.startswith("layers.") and not is_adapter(name)


class Backward(NamedTuple):
    """The result of a step's backward pass, which the update needs."""

    gradients: Tree
    """Gradients of the mean loss times the loss scale."""
    factor: Array
    """Factor that the update applies to the gradients: the clipping factor divided by the loss
    scale."""
    finite: Array | None
    """With fp16, whether the gradients are finite. If not, the step changes only the loss scale."""
    metrics: Array
    """Loss, gradient norm and, with fp16, loss scale."""


def backward_pass(plan: Plan, model: Model, disk: Disk | None = None) -> Callable[..., Backward]:
    """(weights, `TrainState.precision`, frozen, arrays (A, B, ...)) -> `Backward`."""
    task = tasks.of(plan, model)
    loss = task.loss(plan, model, disk)
    scaled, summed = is_scaled(plan.optimize.precision), summed_batches(plan)

    def backward(weights: Tree, state: Array | None, frozen: Tree, arrays: Tree) -> Backward:
        scale = 1.0 if state is None or not scaled else state[0]
        parts = len(jax.tree.leaves(arrays)[0])
        with balancing(weight_of(plan, model, scale * summed / parts)):
            total, gradients = mean_gradients(task, loss, weights, frozen, arrays, scale * summed)
        squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients))
        norm = jnp.sqrt(sum(squares)) / scale
        factor = clip_factor(norm, plan.train.grad_clip) / scale
        metrics = [total / (scale * summed), norm, *([scale] if scaled else [])]
        return Backward(
            gradients, factor, jnp.isfinite(norm) if scaled else None, jnp.stack(metrics)
        )

    return backward


def update_pass(
    plan: Plan, model: Model, transformation: optax.GradientTransformation
) -> Callable[[TrainState, Backward, Array], TrainState]:
    """(TrainState, `Backward`, rates) -> TrainState. `rates` (2,) holds the learning rate, and the
    share of the new weights in their average."""
    rounding = Rounding(plan, model)
    # A step is skipped by an elementwise choice between old and new values, because a branch copies
    # whole arrays. Loops over slices need a branch: they overwrite the old values, so that these are
    # not there to be chosen.
    in_slices = plan.optimize.optimizer in EIGHT_BIT or is_compressed(plan) or is_sliced(plan)

    def update(state: TrainState, found: Backward, rates: Array) -> TrainState:
        rate, share = rates
        finite = found.finite

        def updated(weights: Tree, optimizer: Any) -> tuple[Tree, Any]:
            clipped = jax.tree.map(lambda g: g * found.factor, found.gradients)
            updates, after = transformation.update(clipped, optimizer, weights)
            new = {n: w.astype(jnp.float32) - rate * updates[n] for n, w in weights.items()}
            number = state.precision
            return {n: rounding(n, w, weights[n].dtype, number) for n, w in new.items()}, after

        before = state.weights, state.optimizer
        if finite is None:
            weights, optimizer = updated(*before)
        elif in_slices:
            weights, optimizer = lax.cond(finite, updated, lambda *same: same, *before)
        else:
            weights, optimizer = chosen(finite, updated(*before), before)
        after = adapted(state.precision, finite)
        averages = followed(state.average, weights, counted(share, finite))
        return TrainState(weights, optimizer, after, averages)

    return update


def train_step(
    plan: Plan,
    model: Model,
    transformation: optax.GradientTransformation,
    disk: Disk | None = None,
    shardings: Any = None,
) -> Any:
    """Jitted (TrainState, frozen, arrays (A, B, ...), rates) -> TrainState and `Backward.metrics`. It
    donates the first argument. Both passes are one program, so XLA can reuse the memory of every
    array between them. `shardings` are those of the results on several devices."""
    backward, update = backward_pass(plan, model, disk), update_pass(plan, model, transformation)

    def step(
        state: TrainState, frozen: Tree, arrays: Tree, rates: Array
    ) -> tuple[TrainState, Array]:
        found = backward(state.weights, state.precision, frozen, arrays)
        return update(state, found, rates), found.metrics

    return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def chosen(finite: Array, new: Any, old: Any) -> Any:
    """`new` if the step's gradients are `finite`, else `old`."""
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


def counted(share: Array, finite: Array | None) -> Array:
    """`share`, or 0 in a skipped step."""
    return share if finite is None else jnp.where(finite, share, 0.0)


def evaluation_step(plan: Plan, model: Model, place: Any = None) -> Any:
    """Jitted (sums, trained, frozen, arrays (B, ...)) -> sums including this batch.

    `sums` (2, entries) holds the sums of the task's `evaluation` so far and their rounding errors
    (Kahan 1965), so that float32 suffices for millions of rows. `place` says where the sums are on several devices.
    """
    evaluation = tasks.of(plan, model).evaluation(plan, model)

    def step(sums: Array, trained: Tree, frozen: Tree, arrays: Tree) -> Array:
        total, lost = sums
        more = evaluation(trained, frozen, arrays) - lost
        new = total + more
        return jnp.stack([new, (new - total) - more])

    return jax.jit(step, out_shardings=place)
