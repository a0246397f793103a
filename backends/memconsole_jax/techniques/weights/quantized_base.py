"""Matrices of a frozen base stored as 8- or 4-bit codes, as
`memconsole_trainer.techniques.base_storage` specifies.

Codes and scales are stacked over layers and scanned like other weights. A block decodes each of its
matrices inside a recomputed product, so that the backward pass keeps only the codes.

The codes of one matrix are stored transposed (`Layout`), because a TPU pads the last two axes of an
array to tiles of 128 x 8 or more: blocks of 64 along the last axis would take twice their bytes, and
pairs of values 64 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from numpy.typing import NDArray

from memconsole.plan.plan import BaseStorage
from memconsole_jax import target
from memconsole_jax.layout.stacking import Stack
from memconsole_jax.models.layers import Linear, RowsOf, product
from memconsole_jax.models.recompute import recomputed
from memconsole_trainer.techniques.base_storage import (
    BLOCK,
    NF4,
    SCALES,
    Float32,
    UInt8,
    blocks_of,
    code_bytes,
    quantize,
)


class Layout(NamedTuple):
    """The layout in which the codes of a matrix (outputs, inputs) are stored.

    The matrix, flattened, is cut into rows of `width` elements, a whole number of blocks: the
    matrix's own rows if its blocks do not cross them, else single blocks. This table is stored
    transposed: codes (groups · bytes of a block, rows) and scales (groups, rows). In nf4, element k
    of a block shares a byte with element k + 32, and not with its neighbour as in the specification.
    """

    rows: int
    groups: int
    """Blocks in a row."""

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Layout:
        outputs, inputs = shape
        if inputs % BLOCK:
            return cls(blocks_of(outputs * inputs), 1)
        return cls(outputs, inputs // BLOCK)

    def arrange(self, codes: UInt8, scales: Float32, storage: BaseStorage) -> tuple[UInt8, Float32]:
        """Lay out codes (blocks, bytes) and scales (blocks,) as the specification has them."""
        if storage == "nf4":
            high, low = codes >> 4, codes & 15
            values = np.stack([high, low], axis=-1).reshape(-1, 2, BLOCK // 2)
            codes = (values[:, 0] << 4 | values[:, 1]).astype(np.uint8)
        return codes.reshape(self.rows, -1).T, scales.reshape(self.rows, -1).T


class QuantizedLinear(nnx.Module):
    """``x @ W.T + b`` in the dtype of x. The frozen W is stored as codes and scales in its
    `Layout`."""

    def __init__(self, linear: Linear, scales: Any, shape: tuple[int, int]) -> None:
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_scales = nnx.Param(scales)
        self.shape = shape

    def __call__(self, x: Array) -> Array:
        y = recomputed(self._product, (x,), (self.weight[...], self.weight_scales[...]))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    @property
    def stored(self) -> tuple[Array, Array]:
        """The codes and scales."""
        return self.weight[...], self.weight_scales[...]

    @property
    def rows(self) -> RowsOf:
        """See `Linear.rows`."""
        return partial(decoded_rows, self.shape[1])

    def _product(self, x: Array, codes: Array, scales: Array) -> Array:
        return product(x, decoded(codes, scales, self.shape))


def decoded(codes: Array, scales: Array, shape: tuple[int, int]) -> Array:
    """Decode codes and scales in their `Layout` to the fp32 matrix."""
    table = _table(codes, scales).T
    return table if table.shape == shape else table.reshape(-1)[: math.prod(shape)].reshape(shape)


def _table(codes: Array, scales: Array) -> Array:
    """The decoded numbers in the order of the `Layout`, fp32 (groups * elements of a block, rows)."""
    groups, rows = scales.shape
    blocks = codes.reshape(groups, -1, rows)
    if blocks.shape[1] == BLOCK:
        values = lax.bitcast_convert_type(blocks, jnp.int8).astype(jnp.float32)
    else:
        values = _nf4(jnp.concatenate([blocks >> 4, blocks & 15], axis=1))
    return (values * scales[:, None]).reshape(-1, rows)


def decoded_rows(
    inputs: int, stored: tuple[Array, Array], first: Array, count: int, dtype: Any
) -> Callable[[], Array]:
    """Decode `count` rows of a matrix (outputs, `inputs`), from row `first` on.

    The function that is returned gives them in `dtype`. It turns the table that they are stored in where they are used:
    otherwise XLA for GPUs would turn the codes of all layers before the loop over layers.
    """
    blocks = stored[1].shape[1]
    width = inputs if inputs % BLOCK == 0 else BLOCK
    begin, size = first * inputs, count * inputs
    # If blocks cross the rows of the matrix, the rows may begin and end inside blocks.
    needed = min(blocks, -(-size // width) + (size % width > 0))
    start = jnp.minimum(begin // width, blocks - needed)
    codes, scales = (lax.dynamic_slice_in_dim(array, start, needed, axis=1) for array in stored)
    table = _table(codes, scales).astype(dtype)
    if width == inputs:
        return lambda: table.T
    flat = lax.dynamic_slice_in_dim(table.T.reshape(-1), begin - start * width, size)
    return lambda: flat.reshape(count, inputs)


def _nf4(codes: Array) -> Array:
    """The values of codes 0 to 15. On a TPU, table lookups are slow and padded, so a value is selected bit by
    bit there. On other devices such a selection would make XLA keep each constant as a whole array, so a
    lookup is used."""
    if target.kind() != "tpu":
        table = jnp.array(NF4, jnp.float32)
        return table.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")
    values: list[Array] = [jnp.float32(value) for value in NF4]
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [jnp.where(is_set, odd, even) for even, odd in pairs]
    (found,) = values
    return found


def stored_shapes(stack: Stack, storage: BaseStorage) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype, by name, of the arrays in which a stack of matrices is stored."""
    layout, layers = Layout.of(stack.members[0].shape), len(stack.members)
    return {
        stack.name: ((layers, layout.groups * code_bytes(storage), layout.rows), jnp.uint8),
        stack.name + SCALES: ((layers, layout.groups, layout.rows), jnp.float32),
    }


def gathered(stack: Stack, storage: BaseStorage, tensor: Any) -> Mapping[str, NDArray[np.generic]]:
    """Make these arrays on the host, one matrix at a time."""
    shapes = stored_shapes(stack, storage)
    arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    codes, scales = arrays.values()
    layout = Layout.of(stack.members[0].shape)
    for row, parameter in enumerate(stack.members):
        found = quantize(tensor(parameter.name), storage)
        codes[row], scales[row] = layout.arrange(*found, storage)
    return arrays
