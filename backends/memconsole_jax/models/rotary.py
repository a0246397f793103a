"""Rotary embeddings: they encode a token's position as a rotation of its queries and keys (Su et
al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from memconsole.plan.models.architecture import Architecture, RopeScaling

Rotation = tuple[Array, Array]
"""Cosines and sines (T, D), or (B, T, D), of the rotary embedding, float32."""


def restarted(documents: Array) -> Array:
    """Positions (B, T) counted from the first token of each document."""
    index = jnp.arange(documents.shape[1])
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    return index - lax.cummax(index * begins, axis=1)


def rotate(x: Array, rotation: Rotation) -> Array:
    """Rotary embedding (Su et al. 2021) of x (B, T, heads, D), pairing element i with i + D/2."""
    cos, sin = (table[..., None, :] for table in rotation)  # (T, 1, D)
    y = x.astype(jnp.float32)
    first, second = jnp.split(y, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (y * cos + turned * sin).astype(x.dtype)


def all_rotations(a: Architecture, positions: Array) -> list[Rotation] | None:
    """Rotations of the global layers and, if there are any, of the local layers; None without
    RoPE."""
    if a.positions != "rope":
        return None
    found = [_rotation(positions, a.head_size, a.rope_theta, a.rope_scaling)]
    if a.sliding_window is not None:
        found.append(_rotation(positions, a.head_size, a.rope_local_theta, None))
    return found


def _rotation(
    positions: Array, head_size: int, theta: float, scaling: RopeScaling | None
) -> Rotation:
    frequencies = theta ** -(jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)  # (D/2,)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        frequencies = _llama3(frequencies, scaling)
    angles = positions.astype(jnp.float32)[..., None] * frequencies  # (T, D/2)
    angles = jnp.concatenate([angles, angles], axis=-1)  # (T, D)
    return jnp.cos(angles), jnp.sin(angles)


def _llama3(frequencies: Array, s: RopeScaling) -> Array:
    """Llama 3.1's scaling: frequencies of long wavelengths are divided by `factor`, short ones are
    kept, with a ramp between."""
    turns = s.original_positions * frequencies / (2 * math.pi)
    ramp = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = jnp.clip(ramp, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / s.factor)
