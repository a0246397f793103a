"""Assembles and runs the blocks of a model, whose weights are stacked over layers.

All blocks have the same shapes, so one block's code runs in a `lax.scan` over weights (L, ...). The
program does not grow with depth, unless the scan is unrolled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from memconsole_jax.layout.mesh import all_gather, shard_rows
from memconsole_jax.models import accumulation
from memconsole_jax.models.accumulation import Sums

M = TypeVar("M", bound=nnx.Module)


class BlockRunning(NamedTuple):
    """How the blocks of a model run."""

    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Wraps one block's function for gradient checkpointing, such as `checkpointing.full`."""
    unrolled: bool = False
    """Whether each block has code of its own, instead of one code in a loop."""


def stacked(count: int, one: Callable[[], nnx.Module]) -> Any:
    """`count` blocks made by `one`, as a single module with weights (count, ...)."""
    return nnx.vmap(lambda _: one())(jnp.arange(count))


def run_blocks(
    blocks: nnx.Module,
    x: Array,
    run_block: Callable[..., Array],
    running: BlockRunning | None = None,
    sums: Sums | None = None,
    of_layers: Any = None,
    shared: tuple[Any, ...] = (),
) -> Array:
    """Run x (B, T, C) through all `blocks`.

    `run_block(block, x, of_layer, *shared)` runs a block; `of_layer` is its row of `of_layers`. Gradients
    of the weights named in `sums` are added to `sums` (see `accumulation`), and the weights
    themselves get none.
    """
    graph, weights = nnx.split(blocks)

    def layer(x: Array, weights: Any, of_layer: Any, *shared: Any) -> Array:
        return run_block(nnx.merge(graph, weights), x, of_layer, *shared)

    wrapped_layer = layer if running is None else running.wrap(layer)
    unrolled = running is not None and running.unrolled

    def wrapped(x: Array, weights: Any, of_layer: Any) -> Array:
        return shard_rows(wrapped_layer(shard_rows(x), weights, of_layer, *shared))

    if sums is not None:
        return _run_and_sum_gradients(wrapped, x, weights, of_layers, sums, unrolled)
    xs = weights, of_layers
    x, _ = lax.scan(lambda x, xs: (wrapped(x, *xs), None), x, xs, unroll=unrolled)
    return x


def _run_and_sum_gradients(
    wrapped: Callable[..., Array],
    x: Array,
    weights: Any,
    of_layers: Any,
    sums: Sums,
    unrolled: bool,
) -> Array:
    """Run x through all layers, adding their weights' gradients to `sums`."""
    paths = {".".join(("layers", *path)): path for path, _ in nnx.to_flat_state(weights)}
    sums = {name: total for name, total in sums.items() if name in paths}

    def layer(carry: tuple[Array, Sums], xs: Any) -> tuple[Any, None]:
        x, carried = accumulation.order_backward(*carry) if unrolled else carry
        index, weights, of_layer = xs
        arrays = dict(nnx.to_flat_state(weights))
        summed = {name: arrays[paths[name]][...] for name in carried}
        summed, carried = accumulation.add_gradients(summed, carried, index)
        arrays |= {paths[name]: nnx.Param(array) for name, array in summed.items()}
        weights = nnx.from_flat_state(list(arrays.items()))
        return (wrapped(x, weights, of_layer), carried), None

    layers = jnp.arange(len(jax.tree.leaves(weights)[0]))
    xs = layers, weights, of_layers
    (x, carried), _ = lax.scan(layer, (x, sums), xs, unroll=unrolled)
    return accumulation.start_from(x, carried, lax.stop_gradient(sums))


def assembled(kind: Callable[[Any], M], shape: Any, weights: Mapping[str, Any]) -> M:
    """The module ``kind(shape)`` with `weights`, which have stacked names (see `stacking`). Nothing
    is copied."""
    graph, paths = _abstract(kind, shape)

    def used(name: str) -> Array:
        weight = weights[name]
        return weight if name.startswith("layers.") else all_gather(weight)

    flat = [(path, nnx.Param(used(".".join(path)))) for path in paths]
    module: M = nnx.merge(graph, nnx.from_flat_state(flat))
    return module


@functools.lru_cache(maxsize=16)
def _abstract(kind: Callable[[Any], Any], shape: Any) -> tuple[Any, tuple[tuple[str, ...], ...]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(shape)))
    return graph, tuple(path for path, _ in nnx.to_flat_state(state))
