"""Gradient accumulation inside the backward pass: a block's gradients are added to their sum as soon as they are there.

Summing whole gradients after each micro-batch would hold those of every block beside their sum. Here the sums ride
along the scan over blocks and are what comes back for themselves: their cotangent begins as the sums so far, and each
block, last to first, adds its row. XLA does that in place, as torch's autograd does by itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Sums = dict[str, Array]
"""Gradients summed so far, (L, ...) in float32 by the name of a block's weight."""


@jax.custom_vjp
def adding(weights: Sums, sums: Sums, layer: Array) -> tuple[Sums, Sums]:
    """Both as they are. Backward, the gradients of one layer's `weights` go to row `layer` of `sums`, and none to
    `weights`."""
    return weights, sums


def _adding_forward(weights: Sums, sums: Sums, layer: Array) -> tuple[Any, Array]:
    return (weights, sums), layer


def _adding_backward(layer: Array, cotangents: Any) -> tuple[None, Sums, None]:
    gradients, sums = cotangents

    def add(total: Array, gradient: Array) -> Array:
        row = lax.dynamic_index_in_dim(total, layer, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, row + gradient.astype(jnp.float32), layer, 0)

    return None, {name: add(total, gradients[name]) for name, total in sums.items()}, None


adding.defvjp(_adding_forward, _adding_backward)


@jax.custom_vjp
def begun(x: Array, carried: Sums, sums: Sums) -> Array:
    """x as it is. Backward, what comes back for `carried` begins as `sums`."""
    return x


def _begun_forward(x: Array, carried: Sums, sums: Sums) -> tuple[Array, Sums]:
    return x, sums


def _begun_backward(sums: Sums, cotangent: Array) -> tuple[Array, Sums, None]:
    return cotangent, sums, None


begun.defvjp(_begun_forward, _begun_backward)
