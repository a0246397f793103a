"""Recomputes pieces of a block from their inputs in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(
    function: Callable[..., Array], inputs: tuple[Array | None, ...], rest: tuple[Any, ...] = ()
) -> Array:
    """`function` of `inputs`, which are differentiated, and `rest`, recomputed once its output's
    gradient is known.

    If the whole block is checkpointed too, XLA would compute this piece's intermediates once and
    keep them. `jax.checkpoint` cannot prevent this, because XLA for CPUs ignores its barriers.
    """
    return function(*inputs, *rest)


def _forward(
    function: Callable[..., Array], inputs: tuple[Array | None, ...], rest: tuple[Any, ...]
) -> tuple[Array, Any]:
    return function(*inputs, *rest), (inputs, rest)


def _backward(function: Callable[..., Array], saved: Any, gradient: Array) -> tuple[Any, None]:
    (first, *others), rest = saved
    # A zero from the gradient makes the inputs, and so the recomputation, wait for it.
    first += (0 * gradient.reshape(-1)[0]).astype(first.dtype)
    _, backward = jax.vjp(lambda *inputs: function(*inputs, *rest), first, *others)
    return backward(gradient), None


recomputed.defvjp(_forward, _backward)
