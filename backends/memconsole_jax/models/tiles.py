"""A layer computed for a few positions at a time (tiled MLP; Bekman et al. 2025, arXiv:2506.13996).

Only the input of the layer is kept for the backward pass, which computes each tile again. What is inside the layer exists
for one tile at a time. Tiles are cut along the sequence and have equal lengths. If these add up to more than the sequence,
the first two tiles overlap, and the positions that both have belong to the second one.

Letters in shapes: B batch, T sequence, C hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

Layer = Callable[[Array, Any, Any], Array]
"""(x (B, T, C), trained weights, other weights) -> (B, T, C), each position by itself."""


class _Tiles(NamedTuple):
    """How T positions are cut."""

    number: int
    length: int
    """Positions of a tile."""
    positions: int
    """T."""

    @classmethod
    def of(cls, shape: tuple[int, ...], most: int) -> _Tiles:
        """Tiles of equal length, of at most `most` tokens of x (B, T, C)."""
        rows, positions, _ = shape
        number = -(-positions // max(1, most // rows))
        return cls(number, -(-positions // number), positions)

    def begin(self, tile: Array) -> Array:
        """The first position of a tile."""
        return jnp.maximum(0, self.positions - (self.number - tile) * self.length)

    def of_array(self, x: Array, tile: Array) -> Array:
        """The positions of a tile in x (B, T, C)."""
        return lax.dynamic_slice_in_dim(x, self.begin(tile), self.length, axis=1)

    def written(self, x: Array, tile: Array, part: Array) -> Array:
        """x (B, T, C) with the positions of a tile replaced by `part`."""
        return lax.dynamic_update_slice_in_dim(x, part, self.begin(tile), axis=1)

    def without_overlap(self, part: Array, tile: Array) -> Array:
        """`part` of a tile with zeros at the positions that the next tile has too."""
        end = self.positions - (self.number - 1 - tile) * self.length
        own = self.begin(tile) + jnp.arange(self.length) < end
        return jnp.where(own[:, None], part, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_tiles(layer: Layer, most: int, x: Array, trained: Any, rest: Any) -> Array:
    """`layer` of x (B, T, C), of at most `most` tokens at a time. Only x and the `trained` weights have gradients."""
    tiles = _Tiles.of(x.shape, most)
    one = jax.eval_shape(layer, x, trained, rest)

    def step(tile: Array, y: Array) -> Array:
        return tiles.written(y, tile, layer(tiles.of_array(x, tile), trained, rest))

    return lax.fori_loop(0, tiles.number, step, jnp.zeros(one.shape, one.dtype))


def _forward(layer: Layer, most: int, x: Array, trained: Any, rest: Any) -> tuple[Array, Any]:
    return in_tiles(layer, most, x, trained, rest), (x, trained, rest)


def _backward(layer: Layer, most: int, saved: Any, gradient: Array) -> tuple[Array, Any, None]:
    x, trained, rest = saved
    tiles = _Tiles.of(x.shape, most)

    def step(tile: Array, carry: Any) -> Any:
        by_x, sums = carry
        part = tiles.without_overlap(tiles.of_array(gradient, tile), tile)
        _, backward = jax.vjp(lambda x, w: layer(x, w, rest), tiles.of_array(x, tile), trained)
        by_part, by_weights = backward(part)
        sums = jax.tree.map(lambda total, one: total + one.astype(jnp.float32), sums, by_weights)
        return tiles.written(by_x, tile, by_part), sums

    zeros = jnp.zeros_like(x), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
    by_x, sums = lax.fori_loop(0, tiles.number, step, zeros)
    return by_x, jax.tree.map(lambda total, w: total.astype(w.dtype), sums, trained), None


in_tiles.defvjp(_forward, _backward)
