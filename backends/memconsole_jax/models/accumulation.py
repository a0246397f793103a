"""Gradient accumulation inside the backward pass: a block's gradients are added to the sums as they
are computed.

Summing after each micro-batch would hold the gradients of all blocks in addition to their sums.
Instead, the sums are carried through the scan over blocks. In the backward pass their cotangent
starts as the sums so far, and each block, from last to first, adds its gradients to its row. XLA
does this in place, as torch's autograd does by default.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Sums = dict[str, Array]
"""Gradients summed so far: float32 arrays (L, ...) by the name of a block's weight."""


@jax.custom_vjp
def add_gradients(weights: Sums, sums: Sums, layer: Array) -> tuple[Sums, Sums]:
    """Return `weights` and `sums` unchanged. In the backward pass, the gradients of one layer's
    `weights` are added to row `layer` of the cotangent of `sums`, and `weights` get none."""
    return weights, sums


def _add_gradients_forward(weights: Sums, sums: Sums, layer: Array) -> tuple[Any, Array]:
    return (weights, sums), layer


def _add_gradients_backward(layer: Array, cotangents: Any) -> tuple[None, Sums, None]:
    gradients, sums = cotangents

    def add(total: Array, gradient: Array) -> Array:
        row = lax.dynamic_index_in_dim(total, layer, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, row + gradient.astype(jnp.float32), layer, 0)

    return None, {name: add(total, gradients[name]) for name, total in sums.items()}, None


add_gradients.defvjp(_add_gradients_forward, _add_gradients_backward)


@jax.custom_vjp
def start_from(x: Array, carried: Sums, sums: Sums) -> Array:
    """Return x unchanged. In the backward pass, the cotangent of `carried` starts as `sums`."""
    return x


def _start_from_forward(x: Array, carried: Sums, sums: Sums) -> tuple[Array, Sums]:
    return x, sums


def _start_from_backward(sums: Sums, cotangent: Array) -> tuple[Array, Sums, None]:
    return cotangent, sums, None


start_from.defvjp(_start_from_forward, _start_from_backward)


@jax.custom_vjp
def order_backward(x: Array, carried: Sums) -> tuple[Array, Sums]:
    """Return both unchanged. In the backward pass, the cotangent of x exists only once that of
    `carried` does: outside of a loop, XLA would otherwise keep the gradients of all layers, and add
    them to the sums at the end."""
    return x, carried


def _order_backward_forward(x: Array, carried: Sums) -> tuple[Any, None]:
    return (x, carried), None


def _order_backward_backward(_: None, cotangents: Any) -> Any:
    return lax.optimization_barrier(cotangents)


order_backward.defvjp(_order_backward_forward, _order_backward_backward)
