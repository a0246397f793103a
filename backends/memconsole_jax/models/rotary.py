"""Rotary embeddings: they encode a token's position as a rotation of its queries and keys (Su et
al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from memconsole.plan.models.architecture import Architecture

Rotation = tuple[Array, ...]
"""Cosines and sines (T, R), or (B, T, R), of the R elements of a head that rotate, float32. Two more follow for queries if
these are multiplied (`RopeScaling.query_beta`)."""


def restarted(documents: Array) -> Array:
    """Positions (B, T) counted from the first token of each document."""
    index = jnp.arange(documents.shape[1])
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    return index - lax.cummax(index * begins, axis=1)


def rotate_both(q: Array, k: Array, rotation: Rotation) -> tuple[Array, Array]:
    """Queries and keys (B, T, heads, D) rotated, queries by tables of their own if the rotation has them."""
    return rotate(q, rotation[-2:]), rotate(k, rotation[:2])


def rotate(x: Array, rotation: Rotation) -> Array:
    """Rotary embedding (Su et al. 2021) of x (B, T, heads, D) by the cosines and sines `rotation`: of its first R elements,
    pairing element i with i + R/2."""
    cos, sin = (table[..., None, :] for table in rotation)  # (T, 1, R)
    size = cos.shape[-1]
    y = x[..., :size].astype(jnp.float32)
    first, second = jnp.split(y, 2, axis=-1)
    turned = (y * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def all_rotations(a: Architecture, positions: Array, length: int | Array) -> list[Rotation] | None:
    """Rotations of most layers and, if layers differ, of the others: local ones, or those that do not rotate. None
    without RoPE. Rows have `length` tokens, a number or an array ()."""
    if a.positions != "rope":
        return None
    usual = _rotation(a, positions, length, local=False)
    unrotated = (jnp.ones_like(usual[0]), jnp.zeros_like(usual[0]))
    if a.sliding_window is not None:
        local = _rotation(a, positions, length, local=True)
        return [unrotated if a.unrotated_every else usual, local]
    return [usual, unrotated] if a.mixes_layers else [usual]


def _rotation(a: Architecture, positions: Array, length: int | Array, *, local: bool) -> Rotation:
    original = a.rope_scaling.original_positions if a.rope_scaling else 1
    short, long = (jnp.array(a.angles(n, local=local), jnp.float32) for n in (1, original + 1))
    turns = jnp.where(length > original, long, short)  # (R/2,)
    angles = positions.astype(jnp.float32)[..., None] * turns  # (T, R/2)
    angles = jnp.concatenate([angles, angles], axis=-1)  # (T, R)
    factor = a.rotation_factor(local=local)
    keys = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    longest = length if isinstance(length, int) else a.max_positions
    if a.rope_scaling is None or not a.scales_queries(longest, local=local):
        return keys
    growth = jnp.log1p(jnp.floor(positions / original))[..., None]
    return (*keys, *(table * (1 + a.rope_scaling.query_beta * growth) for table in keys))
