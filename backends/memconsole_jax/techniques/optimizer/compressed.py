"""Moments stored in bfloat16, as `memconsole_trainer.techniques.compressed` specifies, around an
fp32 update rule.

A loop processes slices of a weight's stack: their moments are widened, updated, used, and rounded
back. The loop updates its arrays in place and overwrites the gradient with the update, so no fp32
copy of a whole moment exists.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from memconsole.plan.training.matrices import together
from memconsole_jax import target
from memconsole_jax.techniques.weights.rounding import random_bits
from memconsole_trainer.techniques.compressed import SLOTS, slot_index
from memconsole_trainer.techniques.rounding import threefry

CPU_SLICE = 2**17
"""Elements widened at a time on a CPU."""
DEVICE_SLICE = 2**20

Tree = dict[str, Array]


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
        _, after = rule.update({}, _of(state.rule, ()), None)  # advances only the rule's counts
        updates, moments = {}, {}
        for name, gradient in gradients.items():
            place = places[name]
            one = _OneStack(rule, name, _of(state.rule, (name,)), place.layered)
            keys = [_keys(seeds, state.count, place, slot) for slot in range(len(one.moments))]
            stacks = [x if place.layered else x[None] for x in (gradient, *one.moments)]
            size = _matrices(gradient, place.matrix) if place.matrix else most
            new = _over_slices(one, stacks, keys, size)
            updates[name], *moments[name] = (x if place.layered else x[0] for x in new)
        return updates, CompressedState(state.count + 1, _joined(state.rule, after, moments))

    return optax.GradientTransformation(init, update)


class _OneStack:
    """The rule, applied to slices of one weight's stack."""

    def __init__(
        self, rule: optax.GradientTransformation, name: str, state: Any, layered: bool
    ) -> None:
        self._rule, self._name, self._layered = rule, name, layered
        self._leaves, self._structure = jax.tree.flatten(state)
        self.moments = [x for x in self._leaves if x.ndim]

    def __call__(self, gradient: Array, moments: Sequence[Array]) -> tuple[Array, list[Array]]:
        """The update and the new moments (1, rows, …) in fp32, from the old moments as bits of
        bf16."""
        wide = iter(self._seen(_widened(m)) for m in moments)
        leaves = [next(wide) if x.ndim else x for x in self._leaves]
        state = jax.tree.unflatten(self._structure, leaves)
        updates, after = self._rule.update({self._name: self._seen(gradient)}, state, None)
        new = [x.reshape(gradient.shape) for x in jax.tree.leaves(after) if x.ndim]
        return updates[self._name].reshape(gradient.shape), new

    def _seen(self, x: Array) -> Array:
        return x if self._layered else x[0]


def _over_slices(
    one: _OneStack, stacks: Sequence[Array], keys: Sequence[tuple[Array, Array]], most: int
) -> Sequence[Array]:
    """The update in place of the gradient (L, rows, …), and the new moments.

    A slice is whole rows of about `most` elements, cut in the gradient's own shape, because a TPU
    tiles arrays by their last two axes.
    """
    tensors, rows, *rest = stacks[0].shape
    width = math.prod(rest)
    size = min(max(most // width, 1), rows)
    whole, last = divmod(rows, size)

    def slices(count: int, length: int, start: int, carry: Any) -> Any:
        """Process `count` slices of `length` rows of each tensor, from row `start` on."""

        def body(i: Array, carry: Any) -> Any:
            tensor, row = i // count, start + i % count * length
            corner = (tensor, row, *(0 for _ in rest))
            parts = [lax.dynamic_slice(x, corner, (1, length, *rest)) for x in carry]
            own = [(x[tensor], y[tensor]) for x, y in keys]
            new = _one_slice(one, parts, own, row * width)
            return [lax.dynamic_update_slice(x, y, corner) for x, y in zip(carry, new, strict=True)]

        return lax.fori_loop(0, tensors * count, body, carry)

    carry = slices(whole, size, 0, list(stacks))
    found: Sequence[Array] = slices(1, last, whole * size, carry) if last else carry
    return found


def _one_slice(
    one: _OneStack, parts: Sequence[Array], keys: Sequence[tuple[Array, Array]], start: Array
) -> Sequence[Array]:
    """The update and the new moments of a slice that starts at element `start` of its tensor.

    Reading the slice must not be fused with computing the result. Otherwise XLA would read the
    slice again after it is overwritten in the loop's arrays, and would copy these arrays whole in
    each iteration to allow it. XLA for CPUs drops barriers before it fuses, so a branch is used
    there.
    """

    def renewed(*inputs: Array) -> list[Array]:
        update, moments = one(inputs[0], inputs[1:])
        rounded = [_rounded(m, k, start) for m, k in zip(moments, keys, strict=True)]
        return [update, *rounded]

    def branch(*inputs: Array) -> list[Array]:
        return lax.cond(start >= 0, renewed, lambda *same: list(same), *inputs)

    def barrier(*inputs: Array) -> list[Array]:
        return lax.optimization_barrier(renewed(*lax.optimization_barrier(inputs)))

    found: Sequence[Array] = lax.platform_dependent(*parts, cpu=branch, default=barrier)
    return found


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


def _of(state: Any, names: Collection[str]) -> Any:
    """The part of a rule's state that belongs to the weights `names`."""
    return jax.tree.map(
        lambda x: {n: y for n, y in x.items() if n in names} if isinstance(x, dict) else x,
        state,
        is_leaf=lambda x: isinstance(x, dict),
    )


def _joined(before: Any, counts: Any, moments: Mapping[str, Sequence[Array]]) -> Any:
    """Put together the state of all weights from `counts` and each weight's moments in order."""
    left = {name: iter(found) for name, found in moments.items()}
    return jax.tree.map(
        lambda x, y: {n: next(left[n]) for n in x} if isinstance(x, dict) else y,
        before,
        counts,
        is_leaf=lambda x: isinstance(x, dict),
    )
