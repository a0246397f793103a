"""Muon's update of matrices, as `memconsole_trainer.techniques.muon` specifies. Other weights use
Adam's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from memconsole.plan.training.matrices import together
from memconsole_jax.techniques.optimizer.trees import Tree, divided
from memconsole_trainer.techniques.muon import COEFFICIENTS, EPSILON, MOMENTUM, STEPS, scale


class MuonState(NamedTuple):
    """Momentum by matrix, and Adam's state of the other weights."""

    momentum: Tree
    rest: optax.ScaleByAdamState


def scale_by_muon(
    matrices: Mapping[str, tuple[int, ...]], rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Orthogonalized momentum of `matrices`, and `rest` for the other weights.

    `matrices` maps the names of weights (rows, in), or of their stacks (L, rows, in), to the shape (out, in) of a matrix.
    A weight has one or more matrices, one below the other.
    """

    def init(weights: Tree) -> MuonState:
        inside, outside = divided(weights, matrices)
        momentum = {n: jnp.zeros(w.shape, jnp.float32) for n, w in inside.items()}
        return MuonState(momentum, rest.init(outside))

    def update(
        gradients: Tree, state: MuonState, weights: Tree | None = None
    ) -> tuple[Tree, MuonState]:
        inside, outside = divided(gradients, matrices)
        updates, momentum = {}, {}
        for name, gradient in inside.items():
            m = state.momentum[name]
            m = momentum[name] = m + (1 - MOMENTUM) * (gradient - m)
            updates[name] = scale(matrices[name]) * _each(gradient, m, matrices[name])
        others, after = rest.update(outside, state.rest, None)
        return {n: {**updates, **others}[n] for n in gradients}, MuonState(momentum, after)

    return optax.GradientTransformation(init, update)


def _each(g: Array, m: Array, shape: tuple[int, ...]) -> Array:
    """The update of the matrices of `shape` in the gradient g and momentum m, (L, rows, in) or (rows, in). Loops overwrite
    the gradient, so that temporaries are those of one layer's weight, and of as many of its matrices as are processed at a
    time."""
    if g.ndim > 2:
        return _replaced(g, lambda i, layer: _each(layer, m[i], shape))
    x = g + MOMENTUM * (m - g)
    parts = x.reshape(-1, together(len(x) // shape[0], math.prod(shape)), *shape)
    return _replaced(parts, lambda _, part: orthogonalized(part)).reshape(x.shape)


def _replaced(x: Array, change: Callable[[Array, Array], Array]) -> Array:
    """x with ``change(i, x[i])`` in place of every entry of its leading axis."""
    return lax.fori_loop(0, len(x), lambda i, x: x.at[i].set(change(i, x[i])), x)


def orthogonalized(x: Array) -> Array:
    """Approximate U Vᵀ of each matrix x = U S Vᵀ (..., out, in) with five Newton-Schulz steps."""
    turned = x.shape[-2] > x.shape[-1]
    x = x.mT if turned else x
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT  # (..., m, m)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if turned else x
