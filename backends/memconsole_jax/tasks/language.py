"""Language modeling in JAX: nats of the unmasked targets under a decoder and its head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, uncompiled
from memconsole.plan.tasks.language import MASKED
from memconsole.plan.training.trained import adapter_scale
from memconsole_jax.models import dropout
from memconsole_jax.tasks.sampling import TokenSampler
from memconsole_jax.tasks.task import Evaluation, Head, Loss, Tree
from memconsole_jax.techniques import compilation
from memconsole_jax.techniques.activations import fused_loss, tiled_mlp
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.techniques.weights import precision
from memconsole_jax.techniques.weights.lora import assembled


class Language:
    """Implements `memconsole_jax.tasks.task.Task`."""

    def weight(self, arrays: Tree) -> Array:
        """Number of unmasked targets."""
        return jnp.sum(arrays["targets"] != MASKED)

    def loss(self, plan: Plan, model: Architecture, disk: Disk | None = None) -> Loss:
        return summed_nats(plan, model, chunked=plan.optimize.fused_loss, disk=disk)

    def evaluation(self, plan: Plan, model: Architecture) -> Evaluation:
        """Always computes the loss in chunks, so evaluation never needs more memory than
        training."""
        loss = summed_nats(uncompiled(plan), model, chunked=True)
        return lambda trained, frozen, arrays: loss(trained, frozen, arrays)[None]

    def head(self, weights: Iterable[str]) -> Head:
        """The matrix of the language-model head. In a tied model it is also the embedding."""
        untied = "head.weight" in weights
        return Head("head.weight" if untied else "embedding.weight", shared=not untied)

    def sampler(self, plan: Plan, model: Architecture, weights: Any, place: Any) -> TokenSampler:
        return TokenSampler(model, weights, place, adapter_scale(plan))

    def outputs(self, plan: Plan, model: Architecture, weights: Tree, arrays: Tree) -> Array:
        """Logits (B, T, V) of tokens (B, T)."""
        decoder = assembled(model, weights, adapter_scale(plan))
        dtype = precision.compute_dtype(plan)
        return decoder(arrays["inputs"], dtype, arrays.get("documents")).astype(jnp.float32)


def summed_nats(
    plan: Plan, architecture: Architecture, *, chunked: bool, disk: Disk | None = None
) -> Loss:
    """The loss: summed nats of a micro-batch's targets. With `chunked`, the head is computed in
    chunks of tokens."""
    forward = hidden_states(plan, architecture, disk)
    criterion = fused_loss.chunked if chunked else fused_loss.whole

    def loss(
        trained: Tree,
        frozen: Tree,
        arrays: Tree,
        sums: Tree | None = None,
        share: Array | float = 1.0,
    ) -> Array:
        hidden, head, head_gradient_sum = forward({**trained, **frozen}, arrays, sums)
        cap = architecture.logit_cap
        return criterion(hidden, head, arrays["targets"], share, head_gradient_sum, cap)

    return loss


class Hidden(NamedTuple):
    """What the loss is computed from."""

    hidden: Array
    """The final hidden states (B, T, C)."""
    head: Array
    """The matrix of the head (V, C)."""
    head_gradient_sum: Array | None
    """The sum of the head's gradients so far, if they are summed inside the loss."""


def hidden_states(
    plan: Plan, architecture: Architecture, disk: Disk | None = None
) -> Callable[..., Hidden]:
    """(weights, arrays, `accumulation.Sums` or None) -> `Hidden`."""
    dtype, running = precision.compute_dtype(plan), compilation.running(plan, disk)
    scale, rates = adapter_scale(plan), dropout.Rates.of(plan)

    def forward(weights: Tree, arrays: Tree, sums: Tree | None = None) -> Hidden:
        decoder = assembled(architecture, weights, scale)
        tiled_mlp.apply(plan, decoder)
        with dropout.active(rates, arrays.get(dropout.BITS)):
            hidden = decoder.hidden(arrays["inputs"], dtype, running, arrays.get("documents"), sums)
        gradient_sum = None if sums is None else sums.get(LANGUAGE.head(weights).name)
        return Hidden(hidden, decoder.head_weight, gradient_sum)

    return forward


LANGUAGE = Language()
