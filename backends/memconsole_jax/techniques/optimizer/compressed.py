"""Moments stored in bfloat16, as `memconsole_trainer.techniques.compressed` specifies, around an
fp32 update rule.

A loop processes slices of a weight's stack: their moments are widened, updated, used, and rounded
back. The loop updates its arrays in place and overwrites the gradient with the update, so no fp32
copy of a whole moment exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from memconsole.plan.training.matrices import together
from memconsole_jax import target
from memconsole_jax.techniques.optimizer.slices import (
    CPU_SLICE,
    OneStack,
    Tree,
    joined,
    of,
    over_slices,
)
from memconsole_jax.techniques.weights.rounding import random_bits
from memconsole_trainer.techniques.compressed import SLOTS, slot_index
from memconsole_trainer.techniques.rounding import threefry

DEVICE_SLICE = 2**20
"""Elements widened at a time, except on a CPU."""


class CompressedState(NamedTuple):
    """The number of updates so far, and the rule's state with moments as bf16 bits in uint16
    arrays. With bf16 arrays, XLA for CPUs would convert the whole array to another type and back to
    replace a slice."""

    count: Array
    rule: Any


class Place(NamedTuple):
    """The indices of one stack's tensors in `trained_parameters`."""

    indices: Any
    """uint32 (L,)."""
    layered: bool
    matrix: tuple[int, ...] | None = None
    """The shape of one of the tensor's matrices, if the rule needs whole ones; None if it is elementwise."""


def compressed(
    rule: optax.GradientTransformation,
    places: Mapping[str, Place],
    seed: int,
    slice_elements: int | None = None,
) -> optax.GradientTransformation:
    """`rule` with its moments in bf16. It must not depend on the weights."""
    seeds = np.uint32(seed % 2**32), np.uint32(seed >> 32 & 0xFFFFFFFF)

    def init(weights: Tree) -> CompressedState:
        state = rule.init(weights)
        narrow = jax.tree.map(lambda x: _narrowed(x) if x.ndim else x, state)
        return CompressedState(jnp.zeros((), jnp.uint32), narrow)

    def update(
        gradients: Tree, state: CompressedState, weights: Tree | None = None
    ) -> tuple[Tree, CompressedState]:
        most = slice_elements or (CPU_SLICE if target.kind() == "cpu" else DEVICE_SLICE)
        _, after = rule.update({}, of(state.rule, ()), None)  # advances only the rule's counts
        updates, moments = {}, {}
        for name, gradient in gradients.items():
            place = places[name]
            one = OneStack(rule, name, of(state.rule, (name,)), place.layered)
            keys = [_keys(seeds, state.count, place, slot) for slot in range(len(one.moments))]
            change = partial(_renewed, one, keys)
            stacks = [x if place.layered else x[None] for x in (gradient, *one.moments)]
            size = _matrices(gradient, place.matrix) if place.matrix else most
            new = over_slices(change, stacks, size)
            updates[name], *moments[name] = (x if place.layered else x[0] for x in new)
        return updates, CompressedState(state.count + 1, joined(state.rule, after, moments))

    return optax.GradientTransformation(init, update)


def _renewed(
    one: OneStack,
    keys: Sequence[tuple[Array, Array]],
    tensor: Array,
    start: Array,
    parts: Sequence[Array],
) -> list[Array]:
    """The update in fp32 and the new moments as bits of bf16, from the gradient and the old moments."""
    gradient, *moments = parts
    update, *wide = one([gradient, *(_widened(m) for m in moments)])
    own = [(x[tensor], y[tensor]) for x, y in keys]
    return [update, *(_rounded(m, k, start) for m, k in zip(wide, own, strict=True))]


def _matrices(x: Array, shape: tuple[int, ...]) -> int:
    """The elements of those matrices of `shape` that a rule updates at a time, for x (L, rows, in) or (rows, in)."""
    size = math.prod(shape)
    return size * together(x.shape[-2] // shape[0], size)


def _narrowed(wide: Array) -> Array:
    """The bits, as bfloat16, of fp32 values that bfloat16 represents exactly."""
    return lax.bitcast_convert_type(wide.astype(jnp.bfloat16), jnp.uint16)


def _widened(bits: Array) -> Array:
    """The fp32 values of bfloat16 bits."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _rounded(wide: Array, key: tuple[Array, Array], start: Array) -> Array:
    """Round fp32 values (1, rows, …), a tensor's elements from `start`, to the bits of bfloat16."""
    words = lax.bitcast_convert_type(wide, jnp.uint32) + random_bits(key, wide.shape, start)
    return (words >> 16).astype(jnp.uint16)


def _keys(seeds: tuple[Any, Any], count: Array, place: Place, slot: int) -> tuple[Array, Array]:
    """The key of one moment of each tensor of a stack: two words (L,)."""
    which = np.uint32(slot_index(0, slot)) + np.uint32(SLOTS) * place.indices
    found: tuple[Array, Array] = threefry(seeds, (jnp.full(which.shape, count), which))
    return found
