"""Applies an update rule to slices of stacked weights, in place.

A loop reads a slice of the gradient and of the moments, and overwrites it with the update and the new moments. So no copy of
a whole moment exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

CPU_SLICE = 2**17
"""Elements processed at a time on a CPU."""

Tree = dict[str, Array]
Change = Callable[[Array, Array, Sequence[Array]], Sequence[Array]]
"""(index of the tensor, first element of the slice in it, slices of the stacks (1, rows, …)) -> the new slices."""


def in_slices(
    rule: optax.GradientTransformation, layered: Collection[str], most: int = CPU_SLICE
) -> optax.GradientTransformation:
    """`rule`, which must be elementwise and not depend on the weights, with the same state. `layered`: the names of stacks.

    XLA for CPUs copies a moment that two of its fusions read and one of them overwrites, from the start of the step on.
    """

    def update(gradients: Tree, state: Any, weights: Tree | None = None) -> tuple[Tree, Any]:
        _, after = rule.update({}, of(state, ()), None)  # advances only the rule's counts
        updates, moments = {}, {}
        for name, gradient in gradients.items():
            one = OneStack(rule, name, of(state, (name,)), name in layered)
            stacks = [x if name in layered else x[None] for x in (gradient, *one.moments)]
            new = over_slices(partial(_anywhere, one), stacks, most)
            updates[name], *moments[name] = (x if name in layered else x[0] for x in new)
        return updates, joined(state, after, moments)

    return optax.GradientTransformation(rule.init, update)


def _anywhere(
    one: OneStack, tensor: Array, start: Array, parts: Sequence[Array]
) -> Sequence[Array]:
    """What the rule makes of a slice, wherever it is."""
    return one(parts)


class OneStack:
    """The rule, applied to slices of one weight's stack."""

    def __init__(
        self, rule: optax.GradientTransformation, name: str, state: Any, layered: bool
    ) -> None:
        self._rule, self._name, self._layered = rule, name, layered
        self._leaves, self._structure = jax.tree.flatten(state)
        self.moments = [x for x in self._leaves if x.ndim]

    def __call__(self, parts: Sequence[Array]) -> list[Array]:
        """The update and the new moments (1, rows, …), from the gradient and the old moments."""
        gradient, *moments = parts
        old = iter(self._seen(m) for m in moments)
        leaves = [next(old) if x.ndim else x for x in self._leaves]
        state = jax.tree.unflatten(self._structure, leaves)
        updates, after = self._rule.update({self._name: self._seen(gradient)}, state, None)
        new = [updates[self._name], *(x for x in jax.tree.leaves(after) if x.ndim)]
        return [x.reshape(gradient.shape) for x in new]

    def _seen(self, x: Array) -> Array:
        return x if self._layered else x[0]


def over_slices(change: Change, stacks: Sequence[Array], most: int) -> Sequence[Array]:
    """What `change` makes of the stacks (L, rows, …), slice by slice.

    A slice is whole rows of about `most` elements, cut in the stacks' own shape, because a TPU
    tiles arrays by their last two axes.
    """
    tensors, rows, *rest = stacks[0].shape
    width = math.prod(rest)
    size = min(max(most // width, 1), rows)
    count = -(-rows // size)

    def body(i: Array, carry: Any) -> Any:
        tensor, row = i // count, i % count * size
        # The last slice is whole too. A loop of its own, of one slice, would be unrolled, and its arrays copied.
        first = jnp.minimum(row, rows - size)
        corner = (tensor, first, *(0 for _ in rest))
        parts = [lax.dynamic_slice(x, corner, (1, size, *rest)) for x in carry]
        new = _one_slice(partial(change, tensor, first * width), row - first, parts)
        return [lax.dynamic_update_slice(x, y, corner) for x, y in zip(carry, new, strict=True)]

    found: Sequence[Array] = lax.fori_loop(0, tensors * count, body, list(stacks))
    return found


def _one_slice(
    change: Callable[[Sequence[Array]], Sequence[Array]],
    done: Array,
    parts: Sequence[Array],
) -> Sequence[Array]:
    """What `change` makes of a slice, without its first `done` rows, which were changed before.

    Reading the slice must not be fused with computing the result. Otherwise XLA would read the
    slice again after it is overwritten in the loop's arrays, and would copy these arrays whole in
    each iteration to allow it. XLA for CPUs drops barriers before it fuses, so a branch is used
    there.
    """

    def renewed(*inputs: Array) -> list[Array]:
        new = change(inputs)
        rows = jnp.arange(inputs[0].shape[1]).reshape(1, -1, *(1 for _ in inputs[0].shape[2:]))
        return [jnp.where(rows < done, x, y) for x, y in zip(inputs, new, strict=True)]

    def branch(*inputs: Array) -> list[Array]:
        return lax.cond(done >= 0, renewed, lambda *same: list(same), *inputs)

    def barrier(*inputs: Array) -> list[Array]:
        return lax.optimization_barrier(renewed(*lax.optimization_barrier(inputs)))

    found: Sequence[Array] = lax.platform_dependent(*parts, cpu=branch, default=barrier)
    return found


def of(state: Any, names: Collection[str]) -> Any:
    """The part of a rule's state that belongs to the weights `names`."""
    return jax.tree.map(
        lambda x: {n: y for n, y in x.items() if n in names} if isinstance(x, dict) else x,
        state,
        is_leaf=lambda x: isinstance(x, dict),
    )


def joined(before: Any, counts: Any, moments: Mapping[str, Sequence[Array]]) -> Any:
    """Put together the state of all weights from `counts` and each weight's moments in order."""
    left = {name: iter(found) for name, found in moments.items()}
    return jax.tree.map(
        lambda x, y: {n: next(left[n]) for n in x} if isinstance(x, dict) else y,
        before,
        counts,
        is_leaf=lambda x: isinstance(x, dict),
    )
