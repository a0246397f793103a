"""The loss that spreads tokens evenly over the experts of a block.

It is weight · E · sum over experts of (share of tokens that go to it) · (mean score) (Fedus et al. 2022,
arXiv:2101.03961, equations 4 to 6). Its value is not part of the reported loss. A router's outputs pass through
`balanced` as they are, which adds the gradient of this loss to theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan

_weights: list[Array] = []
"""The weight of the loss in one block, while a training step is traced."""


def weight_of(plan: Plan, model: Model, scale: Array | float) -> Array | None:
    """The weight of the loss in one block: the plan's, divided by the number of blocks. `scale` multiplies the loss of a
    micro-batch. None if there is no such loss."""
    weight = plan.train.expert_balance or 0.0
    if not weight or not isinstance(model, Architecture) or not model.experts:
        return None
    return jnp.float32(scale * weight / model.layers)


@contextmanager
def balancing(weight: Array | None) -> Iterator[None]:
    """A context of tracing in which the loss has this weight."""
    if weight is None:
        yield
        return
    _weights.append(weight)
    try:
        yield
    finally:
        _weights.pop()


def current_weight() -> Array | None:
    """The weight in `balancing`; None outside of it. A block that JAX may trace again in the backward pass must ask before:
    by then the context has ended."""
    return _weights[-1] if _weights else None


def balanced(logits: Array, picked: int) -> Array:
    """A router's outputs (B, T, E), of which the `picked` largest decide where a token goes."""
    return _balanced(picked, logits, _weights[-1]) if _weights else logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _balanced(picked: int, logits: Array, weight: Array) -> Array:
    return logits


def _forward(picked: int, logits: Array, weight: Array) -> tuple[Array, Any]:
    return logits, (logits, weight)


def _backward(picked: int, saved: Any, gradient: Array) -> tuple[Array, Array]:
    logits, weight = saved
    fp32_logits = logits.astype(jnp.float32)
    least_picked = lax.top_k(fp32_logits, picked)[0][..., -1:]
    tokens = tuple(range(logits.ndim - 1))
    share_of_tokens = jnp.mean(
        (fp32_logits >= least_picked).astype(jnp.float32), axis=tokens
    )  # (E,)

    def loss(fp32_logits: Array) -> Array:
        mean_score = jnp.mean(jax.nn.softmax(fp32_logits, axis=-1), axis=tokens)
        return weight * logits.shape[-1] * jnp.sum(share_of_tokens * mean_score)

    return gradient + jax.grad(loss)(fp32_logits).astype(gradient.dtype), jnp.zeros_like(weight)


_balanced.defvjp(_forward, _backward)
