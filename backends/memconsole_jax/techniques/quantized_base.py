"""Matrices of a frozen base stored as 8- or 4-bit codes, as
`memconsole_trainer.techniques.base_storage` specifies.

Codes and scales are stacked over layers and scanned like other weights. A block decodes each of its
matrices inside a recomputed product, so that the backward pass keeps only the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from numpy.typing import NDArray

from memconsole.plan.plan import BaseStorage
from memconsole_jax.models.layers import Linear, product
from memconsole_jax.models.recompute import recomputed
from memconsole_jax.stacking import Stack
from memconsole_trainer.techniques.base_storage import (
    BLOCK,
    SCALES,
    blocks_of,
    code_bytes,
    pairs,
    quantize,
)


class QuantizedLinear(nnx.Module):
    """``x @ W.T + b`` in the dtype of x. The frozen W is stored as codes (blocks, bytes) and scales
    (blocks,)."""

    def __init__(self, linear: Linear, scales: Any, shape: tuple[int, int]) -> None:
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_scales = nnx.Param(scales)
        self.shape = shape

    def __call__(self, x: Array) -> Array:
        y = recomputed(self._product, (x,), (self.weight[...], self.weight_scales[...]))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def _product(self, x: Array, codes: Array, scales: Array) -> Array:
        return product(x, decoded(codes, scales, self.shape))


def decoded(codes: Array, scales: Array, shape: tuple[int, int]) -> Array:
    """Decode codes (blocks, bytes) and scales (blocks,) to the fp32 matrix."""
    if codes.shape[-1] == BLOCK:
        values = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    else:
        table = jnp.asarray(pairs())
        rows = codes.reshape(-1).astype(jnp.int32)
        values = table.at[rows].get(mode="promise_in_bounds").reshape(-1, BLOCK)
    return (values * scales[:, None]).reshape(-1)[: shape[0] * shape[1]].reshape(shape)


def stored_shapes(stack: Stack, storage: BaseStorage) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype, by name, of the arrays in which a stack of matrices is stored."""
    blocks = blocks_of(stack.members[0].size)
    layers = len(stack.members)
    return {
        stack.name: ((layers, blocks, code_bytes(storage)), jnp.uint8),
        stack.name + SCALES: ((layers, blocks), jnp.float32),
    }


def gathered(stack: Stack, storage: BaseStorage, tensor: Any) -> Mapping[str, NDArray[np.generic]]:
    """Make these arrays on the host, one matrix at a time."""
    shapes = stored_shapes(stack, storage)
    arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    codes, scales = arrays.values()
    for row, parameter in enumerate(stack.members):
        codes[row], scales[row] = quantize(tensor(parameter.name), storage)
    return arrays
