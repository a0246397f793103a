"""APOLLO-Mini's update of matrices, as `memconsole_trainer.techniques.apollo` specifies. Other weights use Adam's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from memconsole_jax.techniques.optimizer.trees import Tree, divided
from memconsole_trainer.techniques.apollo import (
    EPSILON,
    GROWTH,
    PERIOD,
    hashed,
    is_tall,
    start_of,
)


class ApolloState(NamedTuple):
    """Moments of the projections by weight, (..., matrices * long side); the norms of the last updates, (..., matrices);
    and Adam's state of the other weights."""

    mu: Tree
    nu: Tree
    size: Tree
    rest: optax.ScaleByAdamState


class Settings(NamedTuple):
    """AdamW's settings, and the plan's seed."""

    beta1: float
    beta2: float
    epsilon: float
    seed: int


def scale_by_apollo_mini(
    matrices: Mapping[str, tuple[int, ...]], rest: optax.GradientTransformation, settings: Settings
) -> optax.GradientTransformation:
    """APOLLO-Mini's rule for `matrices`, and `rest`, Adam's, for the other weights.

    `matrices` maps the names of weights (rows, in), or of their stacks (L, rows, in), to the shape (out, in) of a matrix.
    A weight has one or more matrices, one below the other.
    """

    def init(weights: Tree) -> ApolloState:
        inside, outside = divided(weights, matrices)
        counts = {n: (*w.shape[:-2], w.shape[-2] // matrices[n][0]) for n, w in inside.items()}

        def zeros(sides: Mapping[str, int]) -> Tree:
            return {n: jnp.zeros((*c[:-1], c[-1] * sides[n])) for n, c in counts.items()}

        long = {n: max(shape) for n, shape in matrices.items()}
        one = dict.fromkeys(matrices, 1)
        return ApolloState(zeros(long), zeros(long), zeros(one), rest.init(outside))

    def update(
        gradients: Tree, state: ApolloState, weights: Tree | None = None
    ) -> tuple[Tree, ApolloState]:
        inside, outside = divided(gradients, matrices)
        others, after = rest.update(outside, state.rest, None)
        updates: Tree = {}
        moments: tuple[Tree, Tree, Tree] = {}, {}, {}
        for name, gradient in inside.items():
            before = gradient, state.mu[name], state.nu[name], state.size[name]
            one = partial(_of_weight, matrices[name], after.count, settings)
            updates[name], *new = _each_layer(one, before) if gradient.ndim > 2 else one(before)
            for tree, x in zip(moments, new, strict=True):
                tree[name] = x
        return {n: {**updates, **others}[n] for n in gradients}, ApolloState(*moments, after)

    return optax.GradientTransformation(init, update)


Arrays = tuple[Array, ...]


def _each_layer(change: Callable[[Arrays], Arrays], stacks: Arrays) -> Arrays:
    """`change` for each layer of stacks (L, ...), in a loop that overwrites them: temporaries are those of one layer."""

    def one(layer: Array, stacks: Arrays) -> Arrays:
        new = change(tuple(x[layer] for x in stacks))
        return tuple(x.at[layer].set(part) for x, part in zip(stacks, new, strict=True))

    return lax.fori_loop(0, len(stacks[0]), one, stacks)


def _of_weight(shape: tuple[int, ...], count: Array, settings: Settings, before: Arrays) -> Arrays:
    """The update and the new state of a weight (rows, in) with matrices of `shape`, from its gradient and state."""
    gradient, *moments = before
    each = gradient.reshape(-1, *shape)  # (n, out, in)
    own = tuple(x.reshape(len(each), -1) for x in moments)
    new = _update(each, own, count, settings)
    return tuple(x.reshape(old.shape) for x, old in zip(new, before, strict=True))


def drawn(length: int, seed: int, period: Array) -> Array:
    """Random signs, fp32 (length,)."""
    places = jnp.arange(
        length, dtype=jnp.uint32
    )  # its products keep the lower 32 bits by themselves
    first = hashed(places + jnp.uint32(start_of(seed)), lambda x: x)
    bits = hashed(first + period.astype(jnp.uint32), lambda x: x)
    return 1.0 - 2.0 * (bits & 1).astype(jnp.float32)


def _update(
    gradient: Array, state: tuple[Array, ...], count: Array, settings: Settings
) -> tuple[Array, Array, Array, Array]:
    """The update of matrices with these gradients (n, rows, columns), and their new moments (n, long side) and sizes (n, 1).
    `count`: updates including this one."""
    mu, nu, size = state
    signs = drawn(min(gradient.shape[1:]), settings.seed, (count - 1) // PERIOD)
    if is_tall(gradient.shape):
        projected = jnp.einsum("nij,j->ni", gradient, signs)
    else:
        projected = jnp.einsum("nij,i->nj", gradient, signs)
    mu = settings.beta1 * mu + (1 - settings.beta1) * projected
    nu = settings.beta2 * nu + (1 - settings.beta2) * projected**2
    root = jnp.sqrt(nu / (1 - settings.beta2**count)) + settings.epsilon
    adam = mu / (1 - settings.beta1**count) / root
    norm = jnp.linalg.norm(projected, axis=1, keepdims=True)
    scale = len(signs) ** 0.5 * jnp.linalg.norm(adam, axis=1, keepdims=True) / (norm + EPSILON)
    whole = scale * jnp.sqrt(jnp.sum(gradient**2, (1, 2)))[:, None]
    limit = jnp.where(size > 0, jnp.minimum(1.0, GROWTH * size / whole), 1.0)
    return (scale * limit)[:, :, None] * gradient, mu, nu, whole * limit
