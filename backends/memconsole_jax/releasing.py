"""Frees the device memory of arrays, and restores them later."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jax.tree_util import tree_map_with_path
from numpy.typing import NDArray

from memconsole_jax.layout.mesh import put_donatable
from memconsole_jax.techniques.optimizer import quantized_adam
from memconsole_trainer.engine import ReleaseMode
from memconsole_trainer.techniques import blockwise

SLICE = 2**18
"""Elements that are encoded or decoded at a time; whole blocks."""


@dataclass(eq=False)
class Released:
    """A copy on the host of an array that is freed on its device. JAX treats it as a leaf of a tree."""

    stored: Any
    """A NumPy array, or a JAX array in page-locked memory."""
    sharding: Any
    """The sharding that the array had on the device."""

    @property
    def array(self) -> NDArray[np.generic]:
        """The values on the host."""
        return np.asarray(self.stored)

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.stored.shape
        return shape

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    def restored(self) -> Array:
        """The array on its device."""
        return put_donatable(self.stored, self.sharding)

    def delete(self) -> None:
        """Does nothing: no memory of the device is left to free."""


@dataclass(eq=False)
class Quantized(Released):
    """A float32 array that is stored in 8 bits on its device, as `memconsole_trainer.techniques.blockwise`
    specifies, with the largest element of each block exact. `stored` holds the codes
    (tensors, n).

    A block's scale has the sign of its largest element, so this element becomes 1, which is a value of the
    map. Therefore decoded numbers can be encoded again without a further error.
    """

    scales: Array
    """(tensors, blocks), float32."""
    original_shape: tuple[int, ...]
    signed: bool
    """Whether the values have both signs, which decides the map of the codes."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.original_shape

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float32)

    @property
    def array(self) -> NDArray[np.generic]:
        """The decoded values on the host."""
        return np.array(self.restored())

    def restored(self) -> Array:
        """The decoded array."""
        decoded: Array = _decode(self.stored, self.scales, signed=self.signed)
        return decoded.reshape(self.original_shape)


@dataclass(eq=False)
class Zeroed(Released):
    """An array that is restored as zeros. `stored` is only its shape and dtype."""

    @property
    def array(self) -> NDArray[np.generic]:
        """Zeros."""
        return np.zeros(self.shape, self.dtype)

    def restored(self) -> Array:
        """Zeros on the device."""
        return jnp.zeros(self.shape, self.dtype, device=self.sharding)


def release(tree: Any, mode: ReleaseMode = "cpu") -> Any:
    """Free the device memory of each array of `tree`, one after another. Returns the tree of `Released` copies. Arrays
    that are released already stay as they are."""

    def one(path: Any, x: Any) -> Released:
        if isinstance(x, Released):
            return x
        copy = _copied(path, x, mode)
        jax.block_until_ready(copy.stored if mode != "reinitialize" else ())
        x.delete()
        return copy

    return tree_map_with_path(one, tree)


def restore(tree: Any) -> Any:
    """Restore each released array of `tree` on its device, one after another, and free its copy. Arrays that are not
    released stay as they are."""

    def one(x: Any) -> Any:
        if not isinstance(x, Released):
            return x
        array = x.restored()
        x.stored = None
        return array

    return jax.tree.map(one, tree)


def is_released(tree: Any) -> bool:
    """Whether arrays of `tree` are released."""
    return any(isinstance(x, Released) for x in jax.tree.leaves(tree))


def warm_up(shapes: Any, mode: ReleaseMode) -> None:
    """Compile the functions that release and restore arrays of these shapes, by use on zeros, one array at a time. If
    they were compiled later, the compiler's memory would be counted as that of the arrays."""
    if mode == "compress":
        tree_map_with_path(
            lambda path, x: _copied(path, zeros(x, x.dtype), mode).restored().delete(), shapes
        )


def zeros(shape: Any, dtype: Any) -> Array:
    """Zeros with the shape and the sharding of `shape`, a `jax.ShapeDtypeStruct`."""
    return put_donatable(np.zeros(shape.shape, dtype), shape.sharding)


def _copied(path: Any, x: Array, mode: ReleaseMode) -> Released:
    """The copy from which x will be restored. `path` is its path in the tree of state."""
    if mode == "reinitialize":
        return Zeroed(jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding)
    if mode == "compress" and x.ndim:
        words = [_word(key) for key in path]
        # Blocks never span two of the tensors that are stacked in an array.
        tensors = x.shape[0] if words and words[-1].startswith("layers.") else 1
        signed = "nu" not in words  # Optax's name of second moments
        codes, scales = _encode(x.reshape(tensors, -1), signed=signed)
        return Quantized(codes, x.sharding, scales, x.shape, signed)
    (device,) = x.devices()
    if mode == "pinned" and device.platform != "cpu":
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        return Released(jax.device_put(x, pinned), x.sharding)
    return Released(np.array(x), x.sharding)


@partial(jax.jit, static_argnames="signed")
def _encode(tensors: Array, *, signed: bool) -> tuple[Array, Array]:
    """Codes (tensors, n) and scales (tensors, blocks) of arrays (tensors, n), slice by slice."""

    def one(flat: Array) -> tuple[Array, Array]:
        n, blocks = flat.size, blockwise.scales_of(flat.size)
        size = min(SLICE, blocks * blockwise.BLOCK)
        slices = jnp.pad(flat, (0, -n % size)).reshape(-1, size)
        codes, scales = lax.map(partial(_encode_slice, signed=signed), slices)
        return codes.reshape(-1)[:n], scales.reshape(-1)[:blocks]

    encoded: tuple[Array, Array] = lax.map(one, tensors)
    return encoded


def _encode_slice(flat: Array, *, signed: bool) -> tuple[Array, Array]:
    """Codes (n,) and scales (blocks,) of whole blocks (n,)."""
    block_rows = flat.reshape(-1, blockwise.BLOCK)
    largest = jnp.argmax(jnp.abs(block_rows), axis=1)[:, None]
    sign = jnp.where(jnp.take_along_axis(block_rows, largest, axis=1) < 0, -1.0, 1.0)
    codes, scales = quantized_adam.quantize((block_rows * sign).reshape(-1), signed=signed)
    return codes, scales * sign[:, 0]


@partial(jax.jit, static_argnames="signed")
def _decode(codes: Array, scales: Array, *, signed: bool) -> Array:
    """The arrays (tensors, n) that codes stand for, slice by slice."""

    def one(tensor: tuple[Array, Array]) -> Array:
        codes, scales = tensor
        n, size = codes.size, min(SLICE, scales.size * blockwise.BLOCK)
        code_slices = jnp.pad(codes, (0, -n % size)).reshape(-1, size)
        padded = jnp.pad(scales, (0, code_slices.size // blockwise.BLOCK - scales.size))
        decoded = lax.map(
            lambda one_slice: quantized_adam.dequantize(*one_slice, signed=signed),
            (code_slices, padded.reshape(code_slices.shape[0], -1)),
        )
        return decoded.reshape(-1)[:n]

    decoded: Array = lax.map(one, (codes, scales))
    return decoded


def _word(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", "")))
