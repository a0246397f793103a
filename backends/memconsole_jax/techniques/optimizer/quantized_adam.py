"""Adam whose moments are stored in 8 bits, as `memconsole_trainer.techniques.blockwise` specifies.

It is an Optax transformation over stacked weights. A loop processes slices of a weight: it
dequantizes their moments to fp32, computes the update, and quantizes the new moments. The loop
updates its arrays in place and overwrites the gradient with the update, so no fp32 copy of a whole
moment or weight ever exists. The same gradients give the same codes as in the torch backend.
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
"""Elements that are dequantized at a time on a CPU, as in the torch backend."""
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
        moments_8_bit = {n: _zeros(w, quantized[n]) for n, w in weights.items() if n in quantized}
        others = {n: w for n, w in weights.items() if n not in quantized}
        return _state(
            jnp.zeros((), jnp.int32),
            {n: jnp.zeros(w.shape, jnp.float32) for n, w in others.items()},
            {n: jnp.zeros(w.shape, jnp.float32) for n, w in others.items()},
            moments_8_bit,
        )

    def update(
        gradients: Tree, state: QuantizedAdamState, weights: Tree | None = None
    ) -> tuple[Tree, QuantizedAdamState]:
        count = state.count + 1
        adam = _Adam(beta1, beta2, epsilon, count.astype(jnp.float32))
        most = slice_elements or (CPU_SLICE if target.kind() == "cpu" else DEVICE_SLICE)
        updates, first, second = {}, {}, {}
        moments_8_bit: dict[str, _Moments] = {}
        for name, gradient in gradients.items():
            if name in quantized:
                moments = _Moments(*(getattr(state, field)[name] for field in _Moments._fields))
                stack = gradient if quantized[name] else gradient[None]
                stack, moments_8_bit[name] = _update_in_slices(adam, stack, moments, most)
                updates[name] = stack.reshape(gradient.shape)
            else:
                square = jnp.square(gradient)
                updates[name], first[name], second[name] = adam(
                    gradient, square, state.first[name], state.second[name]
                )
        return updates, _state(count, first, second, moments_8_bit)

    return optax.GradientTransformation(init, update)


def _state(
    count: Array, first: Tree, second: Tree, moments_8_bit: Mapping[str, _Moments]
) -> QuantizedAdamState:
    fields = range(len(_Moments._fields))
    by_field = [{n: moments[i] for n, moments in moments_8_bit.items()} for i in fields]
    return QuantizedAdamState(count, first, second, *by_field)


def _zeros(weight: Any, stacked: bool) -> _Moments:
    """The moments of a weight, or of a stack of weights, before the first step."""
    tensors = weight.shape[0] if stacked else 1
    n = weight.size // tensors
    shape, blocks = (tensors, n), (tensors, blockwise.scales_of(n))
    return _Moments(  # four separate arrays, because each is donated once
        jnp.zeros(shape, jnp.uint8),
        jnp.zeros(blocks, jnp.float32),
        jnp.zeros(shape, jnp.uint8),
        jnp.zeros(blocks, jnp.float32),
    )


class _Adam:
    """One Adam update (Kingma and Ba 2015, algorithm 1) in fp32, for arrays of any shape."""

    def __init__(self, beta1: float, beta2: float, epsilon: float, count: Array) -> None:
        self._new_shares = 1 - beta1, 1 - beta2
        self._epsilon = epsilon
        self.started = count > 0
        self._bias1, self._bias2 = 1 - beta1**count, jnp.sqrt(1 - beta2**count)

    def __call__(
        self, gradient: Array, square: Array, first: Array, second: Array
    ) -> tuple[Array, Array, Array]:
        """The update and the new moments. `square` is the square of the gradient."""
        first = first + self._new_shares[0] * (gradient - first)
        second = second + self._new_shares[1] * (square - second)
        update = first / self._bias1 / (jnp.sqrt(second) / self._bias2 + self._epsilon)
        return update, first, second


def _update_in_slices(
    adam: _Adam, gradient: Array, moments: _Moments, most: int
) -> tuple[Array, _Moments]:
    """The update (L, rows, …), in the memory of the gradient, and the new moments. A slice has at most `most` elements, if
    these are whole blocks.

    Slices are whole rows that fill whole blocks, cut in the gradient's own shape. A TPU tiles
    arrays by their last two axes, so flattening a whole stack would copy it.
    """
    tensors, rows = gradient.shape[:2]
    width = math.prod(gradient.shape[2:])
    whole_blocks = BLOCK // math.gcd(BLOCK, width)  # the fewest rows that fill whole blocks
    slice_rows = min(max(most // width // whole_blocks * whole_blocks, whole_blocks), rows)
    full_slices, rest = divmod(rows, slice_rows)

    def update_slices(count: int, length: int, start: int, arrays: Any) -> Any:
        """Update `count` slices of `length` rows of each tensor, from row `start` on. `arrays` are the gradient and the
        moments."""

        def body(i: Array, arrays: Any) -> Any:
            tensor, row = i // count, start + i % count * length
            element, elements = row * width, length * width
            # Where the slice begins in each array, and its shape there.
            code, scale = (tensor, element), (tensor, element // BLOCK)
            starts = ((tensor, row, *(0,) * (gradient.ndim - 2)), code, scale, code, scale)
            codes, scales = (1, elements), (1, blockwise.scales_of(elements))
            shapes = ((1, length, *gradient.shape[2:]), codes, scales, codes, scales)
            parts = [
                lax.dynamic_slice(x, begin, shape).reshape(-1)
                for x, begin, shape in zip(arrays, starts, shapes, strict=True)
            ]
            new = _update_slice(adam, parts[0], _Moments(*parts[1:]))
            return tuple(
                lax.dynamic_update_slice(x, part.reshape(shape), begin)
                for x, part, begin, shape in zip(arrays, new, starts, shapes, strict=True)
            )

        return lax.fori_loop(0, tensors * count, body, arrays) if count else arrays

    arrays = update_slices(full_slices, slice_rows, 0, (gradient, *moments))
    arrays = update_slices(1 if rest else 0, rest, full_slices * slice_rows, arrays)
    return arrays[0], _Moments(*arrays[1:])


def _update_slice(adam: _Adam, gradient: Array, moments: _Moments) -> tuple[Array, ...]:
    """The update (n,) and the new moments of one slice, which consists of whole blocks.

    Reading the slice must not be fused with the update. Otherwise XLA would read the slice again
    after it is overwritten in the loop's arrays, and would copy these arrays whole in each
    iteration to allow it. It would also add squares and moments without first rounding them to fp32
    as torch does, which changes the last bit and sometimes a code. XLA for CPUs drops barriers
    before it fuses, so a branch is used there.
    """

    def updated(*inputs: Array) -> tuple[Array, ...]:
        update, first, second = adam(*inputs)
        return update, *quantize(first, signed=True), *quantize(second, signed=False)

    def branch(*inputs: Array) -> tuple[Array, ...]:
        return lax.cond(adam.started, updated, lambda gradient, *_: (gradient, *moments), *inputs)

    def barrier(*inputs: Array) -> tuple[Array, ...]:
        return lax.optimization_barrier(updated(*lax.optimization_barrier(inputs)))

    first = dequantize(moments.first_codes, moments.first_scales, signed=True)
    second = dequantize(moments.second_codes, moments.second_scales, signed=False)
    inputs = (gradient, jnp.square(gradient), first, second)
    return lax.platform_dependent(*inputs, cpu=branch, default=barrier)


def dequantize(codes: Array, scales: Array, *, signed: bool) -> Array:
    """The values fp32 (n,) of codes (n,) with scales (blocks,)."""
    n, blocks = codes.shape[0], scales.shape[0]
    values = _take(blockwise.values(signed=signed), codes.astype(jnp.int32))
    padded = jnp.pad(values, (0, blocks * BLOCK - n)).reshape(blocks, BLOCK)
    return (padded * scales[:, None]).reshape(-1)[:n]


def quantize(moment: Array, *, signed: bool) -> tuple[Array, Array]:
    """Codes (n,) and scales (blocks,) of a moment, fp32 (n,)."""
    n = moment.shape[0]
    blocks = jnp.pad(moment, (0, -n % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1)
    reciprocals = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0.0, 1.0 / scales)
    scaled = (blocks * reciprocals[:, None]).reshape(-1)[:n]
    bits = lax.bitcast_convert_type(scaled, jnp.int32)
    rows = ((bits + blockwise.HALF) >> 16) + blockwise.OFFSET
    return _take(blockwise.lookup(signed=signed), rows), scales


def _take(table: Any, rows: Array) -> Array:
    return jnp.asarray(table).at[rows].get(mode="promise_in_bounds")
