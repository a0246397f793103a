"""Adam whose moments are stored in 8 bits, as `memconsole_trainer.techniques.blockwise` specifies.

It is an Optax transformation over stacked weights. A loop processes slices of a weight: their
moments are widened to fp32, updated, used, and narrowed again. The loop updates its arrays in place
and overwrites the gradient with the update, so no fp32 copy of a whole moment or weight ever
exists. The same gradients give the same codes as in the torch backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from memconsole_jax import target
from memconsole_trainer.techniques import blockwise
from memconsole_trainer.techniques.blockwise import BLOCK

CPU_SLICE = 2**17
"""Elements widened at a time on a CPU, as in the torch backend."""
DEVICE_SLICE = 2**20

Tree = dict[str, Array]


class QuantizedAdamState(NamedTuple):
    """Moments by weight: fp32 in `first` and `second`, or codes (L, n) and scales (L, blocks)."""

    count: Array
    first: Tree
    second: Tree
    first_codes: Tree
    first_scales: Tree
    second_codes: Tree
    second_scales: Tree


class _Moments(NamedTuple):
    """The four arrays of a quantized weight, or of a slice of one."""

    first_codes: Array
    first_scales: Array
    second_codes: Array
    second_scales: Array


def scale_by_quantized_adam(
    beta1: float,
    beta2: float,
    epsilon: float,
    quantized: Mapping[str, bool],
    slice_elements: int | None = None,
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with 8-bit moments for some weights.

    `quantized` maps their names to whether the weight is a stack (L, …) of tensors. Blocks never
    span two tensors of a stack, so a moment's codes do not depend on how weights are stacked.
    """

    def init(weights: Tree) -> QuantizedAdamState:
        narrow = {n: _blank(w, quantized[n]) for n, w in weights.items() if n in quantized}
        wide = {n: w for n, w in weights.items() if n not in quantized}
        return _state(
            jnp.zeros((), jnp.int32),
            {n: jnp.zeros(w.shape, jnp.float32) for n, w in wide.items()},
            {n: jnp.zeros(w.shape, jnp.float32) for n, w in wide.items()},
            narrow,
        )

    def update(
        gradients: Tree, state: QuantizedAdamState, weights: Tree | None = None
    ) -> tuple[Tree, QuantizedAdamState]:
        count = state.count + 1
        rule = _Rule(beta1, beta2, epsilon, count.astype(jnp.float32))
        most = slice_elements or (CPU_SLICE if target.kind() == "cpu" else DEVICE_SLICE)
        updates, first, second = {}, {}, {}
        narrow: dict[str, _Moments] = {}
        for name, gradient in gradients.items():
            if name in quantized:
                moments = _Moments(*(getattr(state, field)[name] for field in _Moments._fields))
                stack = gradient if quantized[name] else gradient[None]
                stack, narrow[name] = _over_slices(rule, stack, moments, most)
                updates[name] = stack.reshape(gradient.shape)
            else:
                square = jnp.square(gradient)
                updates[name], first[name], second[name] = rule(
                    gradient, square, state.first[name], state.second[name]
                )
        return updates, _state(count, first, second, narrow)

    return optax.GradientTransformation(init, update)


def _state(
    count: Array, first: Tree, second: Tree, narrow: Mapping[str, _Moments]
) -> QuantizedAdamState:
    by_field = [{n: m[i] for n, m in narrow.items()} for i in range(len(_Moments._fields))]
    return QuantizedAdamState(count, first, second, *by_field)


def _blank(weight: Any, stacked: bool) -> _Moments:
    tensors = weight.shape[0] if stacked else 1
    n = weight.size // tensors
    shape, blocks = (tensors, n), (tensors, blockwise.scales_of(n))
    return _Moments(  # four separate arrays, because each is donated once
        jnp.zeros(shape, jnp.uint8),
        jnp.zeros(blocks, jnp.float32),
        jnp.zeros(shape, jnp.uint8),
        jnp.zeros(blocks, jnp.float32),
    )


class _Rule:
    """One Adam update (Kingma and Ba 2015, algorithm 1) in fp32, for any shape."""

    def __init__(self, beta1: float, beta2: float, epsilon: float, count: Array) -> None:
        self._keep = 1 - beta1, 1 - beta2
        self._epsilon = epsilon
        self.started = count > 0
        self._bias1, self._bias2 = 1 - beta1**count, jnp.sqrt(1 - beta2**count)

    def __call__(
        self, gradient: Array, square: Array, first: Array, second: Array
    ) -> tuple[Array, Array, Array]:
        first = first + self._keep[0] * (gradient - first)
        second = second + self._keep[1] * (square - second)
        update = first / self._bias1 / (jnp.sqrt(second) / self._bias2 + self._epsilon)
        return update, first, second


def _over_slices(
    rule: _Rule, gradient: Array, moments: _Moments, most: int
) -> tuple[Array, _Moments]:
    """The update (L, rows, …) in place of the gradient, and the new moments.

    Slices are whole rows that fill whole blocks, cut in the gradient's own shape. A TPU tiles
    arrays by their last two axes, so flattening a whole stack would copy it.
    """
    tensors, rows = gradient.shape[:2]
    width = math.prod(gradient.shape[2:])
    unit = BLOCK // math.gcd(BLOCK, width)
    size = min(max(most // width // unit * unit, unit), rows)
    whole, rest = divmod(rows, size)

    def slices(count: int, length: int, start: int, carry: Any) -> Any:
        """Process `count` slices of `length` rows of each tensor, from row `start` on."""

        def body(i: Array, carry: Any) -> Any:
            tensor, row = i // count, start + i % count * length
            element = row * width
            code, scale = (tensor, element), (tensor, element // BLOCK)
            places = ((tensor, row, *(0,) * (gradient.ndim - 2)), code, scale, code, scale)
            codes, scales = (1, length * width), (1, blockwise.scales_of(length * width))
            extents = ((1, length, *gradient.shape[2:]), codes, scales, codes, scales)
            parts = [
                lax.dynamic_slice(x, p, s).reshape(-1)
                for x, p, s in zip(carry, places, extents, strict=True)
            ]
            new = _one_slice(rule, parts[0], _Moments(*parts[1:]))
            return tuple(
                lax.dynamic_update_slice(x, y.reshape(s), p)
                for x, y, p, s in zip(carry, new, places, extents, strict=True)
            )

        return lax.fori_loop(0, tensors * count, body, carry) if count else carry

    carry = slices(whole, size, 0, (gradient, *moments))
    carry = slices(1 if rest else 0, rest, whole * size, carry)
    return carry[0], _Moments(*carry[1:])


def _one_slice(rule: _Rule, gradient: Array, moments: _Moments) -> tuple[Array, ...]:
    """The update (n,) and the new moments of one slice, which consists of whole blocks.

    Reading the slice must not be fused with the update. Otherwise XLA would read the slice again
    after it is overwritten in the loop's arrays, and would copy these arrays whole in each
    iteration to allow it. It would also add squares and moments without first rounding them to fp32
    as torch does, which changes the last bit and sometimes a code. XLA for CPUs drops barriers
    before it fuses, so a branch is used there.
    """

    def renewed(*inputs: Array) -> tuple[Array, ...]:
        update, first, second = rule(*inputs)
        return update, *narrow(first, signed=True), *narrow(second, signed=False)

    def branch(*inputs: Array) -> tuple[Array, ...]:
        return lax.cond(rule.started, renewed, lambda gradient, *_: (gradient, *moments), *inputs)

    def barrier(*inputs: Array) -> tuple[Array, ...]:
        return lax.optimization_barrier(renewed(*lax.optimization_barrier(inputs)))

    first = widen(moments.first_codes, moments.first_scales, signed=True)
    second = widen(moments.second_codes, moments.second_scales, signed=False)
    inputs = (gradient, jnp.square(gradient), first, second)
    return lax.platform_dependent(*inputs, cpu=branch, default=barrier)


def widen(codes: Array, scales: Array, *, signed: bool) -> Array:
    """Decode codes (n,) with scales (blocks,) to fp32 (n,)."""
    n, blocks = codes.shape[0], scales.shape[0]
    found = _looked_up(blockwise.values(signed=signed), codes.astype(jnp.int32))
    padded = jnp.pad(found, (0, blocks * BLOCK - n)).reshape(blocks, BLOCK)
    return (padded * scales[:, None]).reshape(-1)[:n]


def narrow(moment: Array, *, signed: bool) -> tuple[Array, Array]:
    """Encode fp32 (n,) as codes (n,) and scales (blocks,)."""
    n = moment.shape[0]
    blocks = jnp.pad(moment, (0, -n % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1)
    reciprocals = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0.0, 1.0 / scales)
    shares = (blocks * reciprocals[:, None]).reshape(-1)[:n]
    bits = lax.bitcast_convert_type(shares, jnp.int32)
    rows = ((bits + blockwise.HALF) >> 16) + blockwise.OFFSET
    return _looked_up(blockwise.lookup(signed=signed), rows), scales


def _looked_up(table: Any, rows: Array) -> Array:
    return jnp.asarray(table).at[rows].get(mode="promise_in_bounds")
