"""Muon's update of matrices, as `memconsole_trainer.techniques.muon` specifies. Other weights use
Adam's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from memconsole_trainer.techniques.muon import COEFFICIENTS, EPSILON, MOMENTUM, STEPS, scale

Tree = dict[str, Array]


class MuonState(NamedTuple):
    """Momentum by matrix, and Adam's state of the other weights."""

    momentum: Tree
    rest: optax.ScaleByAdamState


def scale_by_muon(
    matrices: Mapping[str, bool], rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Orthogonalized momentum of `matrices`, and `rest` for the other weights.

    `matrices` maps their names to whether the weight is a stack (L, out, in) of matrices.
    """

    def divided(tree: Tree) -> tuple[Tree, Tree]:
        inside = {n: x for n, x in tree.items() if n in matrices}
        return inside, {n: x for n, x in tree.items() if n not in matrices}

    def init(weights: Tree) -> MuonState:
        inside, outside = divided(weights)
        momentum = {n: jnp.zeros(w.shape, jnp.float32) for n, w in inside.items()}
        return MuonState(momentum, rest.init(outside))

    def update(
        gradients: Tree, state: MuonState, weights: Tree | None = None
    ) -> tuple[Tree, MuonState]:
        inside, outside = divided(gradients)
        updates, momentum = {}, {}
        for name, gradient in inside.items():
            m = state.momentum[name]
            m = momentum[name] = m + (1 - MOMENTUM) * (gradient - m)
            x = gradient + MOMENTUM * (m - gradient)
            # One layer's matrix at a time, so that temporaries are those of one matrix.
            whole = lax.map(orthogonalized, x) if matrices[name] else orthogonalized(x)
            updates[name] = scale(x.shape) * whole
        others, after = rest.update(outside, state.rest, None)
        return {n: {**updates, **others}[n] for n in gradients}, MuonState(momentum, after)

    return optax.GradientTransformation(init, update)


def orthogonalized(x: Array) -> Array:
    """Approximate U Vᵀ of x = U S Vᵀ (out, in) with five Newton-Schulz steps."""
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / jnp.maximum(jnp.linalg.norm(x), EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T  # (m, m)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x
