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
from memconsole.plan.sections import EIGHT_BIT
from memconsole_jax.techniques import checkpointing, precision
from memconsole_jax.techniques.activation_offload import Disk
from memconsole_jax.techniques.average import followed
from memconsole_jax.techniques.fused_loss import MASKED, chunked_nats, plain_nats
from memconsole_jax.techniques.lora import assembled, is_adapter
from memconsole_jax.techniques.optimizers import clip_factor
from memconsole_jax.techniques.precision import adapted
from memconsole_jax.techniques.rounding import Rounding
from memconsole_trainer.techniques.compressed import is_compressed
from memconsole_trainer.techniques.loss_scale import is_scaled

Tree = dict[str, Array]
Loss = Callable[..., Array]
"""Summed nats of one micro-batch: (trained, kept, inputs (B, T), targets (B, T), documents (B, T) or None,
`accumulation.Sums` or None, share) -> scalar, times the share."""


class TrainState(NamedTuple):
    """What a step replaces, donated to it."""

    weights: Tree
    optimizer: Any
    precision: Any = None
    """The state (3,) of the loss scale with fp16, the step's number with bf16-sr."""
    average: Any = None
    """Of the weights, in float32, where the plan has one."""


def summed_loss(
    plan: Plan, architecture: Architecture, *, chunked: bool, disk: Disk | None = None
) -> Loss:
    """The loss that `plan` trains, the head's part in chunks or not. `disk`: for activations of a CPU."""
    dtype = precision.compute_dtype(plan)
    o = plan.optimize
    around = checkpointing.around(o.gradient_checkpointing, offload=o.activation_offload, disk=disk)
    nats = chunked_nats if chunked else plain_nats

    def loss(
        trained: Tree,
        kept: Tree,
        inputs: Array,
        targets: Array,
        documents: Array | None,
        sums: Tree | None = None,
        share: Array | float = 1.0,
    ) -> Array:
        decoder = assembled(architecture, {**trained, **kept})
        hidden = decoder.hidden(inputs, dtype, around, documents, sums)
        begun = (sums or {}).get(head_name(trained | kept))
        return nats(hidden, decoder.head_weight, targets, share, begun)

    return loss


def mean_gradients(
    loss: Loss,
    trained: Tree,
    kept: Tree,
    inputs: Array,
    targets: Array,
    scale: Array | float = 1.0,
    documents: Array | None = None,
) -> tuple[Array, Tree]:
    """Mean nats over all unmasked targets (A, B, T) times `scale`, and its gradients: float32 where they are summed
    over micro-batches, else in the weights' dtypes.

    Micro-batches run one after another; each contributes its sum divided by the count of the whole
    effective batch, so the result does not depend on how the rows were cut. The gradients of blocks and of the head
    are summed inside the backward pass; adapters, small as they are, and looked-up rows after it.
    """
    share = scale / jnp.maximum(jnp.sum(targets != MASKED), 1).astype(jnp.float32)
    if inputs.shape[0] == 1:
        own = None if documents is None else documents[0]
        return jax.value_and_grad(lambda w: loss(w, kept, inputs[0], targets[0], own, None, share))(
            trained
        )
    head = head_name(trained | kept)
    inside = {n: w for n, w in trained.items() if is_block(n) or n == head}
    outside = {n: w for n, w in trained.items() if n not in inside or n == "embedding.weight"}

    def of_one(outside: Tree, sums: Tree, rows: Any) -> Array:
        inputs, targets, documents = rows
        return loss({**inside, **outside}, kept, inputs, targets, documents, sums or None, share)

    def add(total: tuple[Array, Tree], rows: Any) -> tuple[Any, None]:
        nats, sums = total
        begun = {n: sums[n] for n in inside}
        more, (gradients, added) = jax.value_and_grad(of_one, (0, 1))(outside, begun, rows)
        sums = sums | added
        return (nats + more, sums | {n: sums[n] + g for n, g in gradients.items()}), None

    zeros = {n: jnp.zeros(w.shape, jnp.float32) for n, w in trained.items()}
    return lax.scan(add, (jnp.float32(0.0), zeros), (inputs, targets, documents))[0]


def head_name(weights: Tree) -> str:
    """Which of them is the matrix of the language-model head."""
    return "head.weight" if "head.weight" in weights else "embedding.weight"


def is_block(name: str) -> bool:
    """Whether a trained array is of the blocks themselves, not of their adapters."""
    return name.startswith("layers.") and not is_adapter(name)


class Backward(NamedTuple):
    """What a step's micro-batches leave for the update of the weights."""

    gradients: Tree
    """Of the mean loss, times the loss scale."""
    factor: Array
    """What they are multiplied by: clipping over the loss scale."""
    finite: Array | None
    """With fp16, whether they are finite; a step whose gradients are not changes nothing but the scale."""
    metrics: Array
    """Loss, gradient norm and, where there is one, loss scale."""


def backward_pass(
    plan: Plan, architecture: Architecture, disk: Disk | None = None
) -> Callable[..., Backward]:
    """(weights, `TrainState.precision`, kept, inputs (A, B, T), targets, documents or None) -> `Backward`."""
    loss = summed_loss(plan, architecture, chunked=plan.optimize.fused_loss, disk=disk)
    scaled = is_scaled(plan.optimize.precision)

    def backward(
        weights: Tree,
        state: Array | None,
        kept: Tree,
        inputs: Array,
        targets: Array,
        documents: Array | None,
    ) -> Backward:
        scale = 1.0 if state is None or not scaled else state[0]
        total, gradients = mean_gradients(loss, weights, kept, inputs, targets, scale, documents)
        squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients))
        norm = jnp.sqrt(sum(squares)) / scale
        factor = clip_factor(norm, plan.train.grad_clip) / scale
        metrics = [total / scale, norm, *([scale] if scaled else [])]
        return Backward(
            gradients, factor, jnp.isfinite(norm) if scaled else None, jnp.stack(metrics)
        )

    return backward


def train_step(
    plan: Plan,
    architecture: Architecture,
    transformation: optax.GradientTransformation,
    disk: Disk | None = None,
) -> Any:
    """Jitted (TrainState, kept, inputs (A, B, T), targets, rates, documents or None) -> TrainState and
    `Backward.metrics`; donates the first argument. `rates` (2,): the learning rate, and the share of the new
    weights in their average."""
    backward = backward_pass(plan, architecture, disk)
    rounding = Rounding(plan, architecture)
    # Where a step is skipped element by element, XLA updates arrays in place; a branch copies them whole. A loop
    # over slices overwrites what would be chosen.
    in_slices = plan.optimize.optimizer in EIGHT_BIT or is_compressed(plan)

    def step(
        state: TrainState,
        kept: Tree,
        inputs: Array,
        targets: Array,
        rates: Array,
        documents: Array | None = None,
    ) -> tuple[TrainState, Array]:
        rate, share = rates
        gradients, factor, finite, metrics = backward(
            state.weights, state.precision, kept, inputs, targets, documents
        )

        def updated(weights: Tree, optimizer: Any) -> tuple[Tree, Any]:
            clipped = jax.tree.map(lambda g: g * factor, gradients)
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
        return TrainState(weights, optimizer, after, averages), metrics

    return jax.jit(step, donate_argnums=0)


def chosen(finite: Array, new: Any, old: Any) -> Any:
    """`new` where the step's gradients are `finite`, else `old`."""
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


def counted(share: Array, finite: Array | None) -> Array:
    """`share`, or none in a step that is skipped."""
    return share if finite is None else jnp.where(finite, share, 0.0)


def evaluation_step(plan: Plan, architecture: Architecture) -> Any:
    """Jitted (sums, trained, kept, inputs (B, T), targets, documents or None) -> sums with this batch's nats added.

    `sums` is [total, rounding lost] (Kahan 1965), so that millions of tokens add up in float32. The
    loss is always chunked: evaluation never needs more memory than training.
    """
    loss = summed_loss(plan, architecture, chunked=True)

    def step(
        sums: Array,
        trained: Tree,
        kept: Tree,
        inputs: Array,
        targets: Array,
        documents: Array | None = None,
    ) -> Array:
        total, lost = sums
        nats = loss(trained, kept, inputs, targets, documents) - lost
        new = total + nats
        return jnp.stack([new, (new - total) - nats])

    return jax.jit(step)
