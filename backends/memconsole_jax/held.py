"""Frees the device memory of arrays, and fills it again."""

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

from memconsole_jax.layout.mesh import put_to_replace
from memconsole_jax.techniques.optimizer import quantized_adam
from memconsole_trainer.engine import Keeping
from memconsole_trainer.techniques import blockwise

SLICE = 2**18
"""Elements that are encoded or decoded at a time; whole blocks."""


@dataclass(eq=False)
class Released:
    """An array on the host with its original sharding. JAX treats it as a leaf of a tree."""

    kept: Any
    """An array of NumPy, or one of JAX in page-locked memory."""
    sharding: Any

    @property
    def array(self) -> NDArray[np.generic]:
        """The values on the host."""
        return np.asarray(self.kept)

    @property
    def shape(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.kept.shape
        return found

    @property
    def dtype(self) -> Any:
        return self.kept.dtype

    def restored(self) -> Array:
        """The array on its device."""
        return put_to_replace(self.kept, self.sharding)

    def delete(self) -> None:
        """Does nothing, because nothing is on the device."""


@dataclass(eq=False)
class Coded(Released):
    """A float32 array in 8 bits on its device, as `memconsole_trainer.techniques.blockwise`
    specifies, with the largest element of each block exact. `kept` holds the codes
    (tensors, n).

    A block's scale has the sign of its largest element, so this element becomes 1, which is a value of the
    map. Therefore decoded numbers can be encoded again without a further error.
    """

    scales: Array
    form: tuple[int, ...]
    signed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float32)

    @property
    def array(self) -> NDArray[np.generic]:
        """The values that the codes stand for."""
        return np.array(self.restored())

    def restored(self) -> Array:
        """The array that the codes stand for."""
        found: Array = _decode(self.kept, self.scales, signed=self.signed).reshape(self.form)
        return found


@dataclass(eq=False)
class Dropped(Released):
    """An array that starts again with zeros. `kept` holds its shape and dtype."""

    @property
    def array(self) -> NDArray[np.generic]:
        """Zeros."""
        return np.zeros(self.shape, self.dtype)

    def restored(self) -> Array:
        """Zeros on the device."""
        return jnp.zeros(self.shape, self.dtype, device=self.sharding)


def release(tree: Any, keeping: Keeping = "cpu") -> Any:
    """Free the device memory of each array of `tree`, one after another. Arrays that are released already stay
    released."""

    def one(path: Any, x: Any) -> Released:
        if isinstance(x, Released):
            return x
        found = _released(path, x, keeping)
        jax.block_until_ready(found.kept if keeping != "reinitialize" else ())
        x.delete()
        return found

    return tree_map_with_path(one, tree)


def prepare(shapes: Any, keeping: Keeping) -> None:
    """Compile the functions that release and restore arrays of these shapes, one array at a time. If this
    were done later, the compiler's memory would be counted as that of the arrays."""
    if keeping == "compress":
        tree_map_with_path(
            lambda path, x: _released(path, zeros(x, x.dtype), keeping).restored().delete(), shapes
        )


def zeros(shape: Any, dtype: Any) -> Array:
    """Zeros with the shape and the sharding of `shape`."""
    return put_to_replace(np.zeros(shape.shape, dtype), shape.sharding)


def _released(path: Any, x: Array, keeping: Keeping) -> Released:
    """`path` is the array's place in its tree."""
    if keeping == "reinitialize":
        return Dropped(jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding)
    if keeping == "compress" and x.ndim:
        words = [_word(key) for key in path]
        # Blocks never span two of the tensors that are stacked in an array.
        tensors = x.shape[0] if words and words[-1].startswith("layers.") else 1
        signed = "nu" not in words  # Optax's name of second moments
        codes, scales = _encode(x.reshape(tensors, -1), signed=signed)
        return Coded(codes, x.sharding, scales, x.shape, signed)
    (device,) = x.devices()
    if keeping == "pinned" and device.platform != "cpu":
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        return Released(jax.device_put(x, pinned), x.sharding)
    return Released(np.array(x), x.sharding)


def restore(tree: Any) -> Any:
    """Move each array of `tree` back to the device, one after another, and free its copy or codes. Arrays that are
    already there stay."""

    def one(x: Any) -> Any:
        if not isinstance(x, Released):
            return x
        found = x.restored()
        x.kept = None
        return found

    return jax.tree.map(one, tree)


def is_released(tree: Any) -> bool:
    """Whether arrays of `tree` are released."""
    return any(isinstance(x, Released) for x in jax.tree.leaves(tree))


@partial(jax.jit, static_argnames="signed")
def _encode(tensors: Array, *, signed: bool) -> tuple[Array, Array]:
    """Codes (tensors, n) and scales (tensors, blocks) of arrays (tensors, n), slice by slice."""

    def one(flat: Array) -> tuple[Array, Array]:
        n, blocks = flat.size, blockwise.scales_of(flat.size)
        size = min(SLICE, blocks * blockwise.BLOCK)
        rows = jnp.pad(flat, (0, -n % size)).reshape(-1, size)
        codes, scales = lax.map(partial(_narrow, signed=signed), rows)
        return codes.reshape(-1)[:n], scales.reshape(-1)[:blocks]

    found: tuple[Array, Array] = lax.map(one, tensors)
    return found


def _narrow(row: Array, *, signed: bool) -> tuple[Array, Array]:
    """Codes (n,) and scales (blocks,) of whole blocks (n,)."""
    cut = row.reshape(-1, blockwise.BLOCK)
    places = jnp.argmax(jnp.abs(cut), axis=1)[:, None]
    sign = jnp.where(jnp.take_along_axis(cut, places, axis=1) < 0, -1.0, 1.0)
    codes, scales = quantized_adam.narrow((cut * sign).reshape(-1), signed=signed)
    return codes, scales * sign[:, 0]


@partial(jax.jit, static_argnames="signed")
def _decode(codes: Array, scales: Array, *, signed: bool) -> Array:
    """The arrays (tensors, n) that codes stand for, slice by slice."""

    def one(tensor: tuple[Array, Array]) -> Array:
        codes, scales = tensor
        n, size = codes.size, min(SLICE, scales.size * blockwise.BLOCK)
        rows = jnp.pad(codes, (0, -n % size)).reshape(-1, size)
        parts = jnp.pad(scales, (0, rows.size // blockwise.BLOCK - scales.size))
        wide = lax.map(
            lambda row: quantized_adam.widen(*row, signed=signed),
            (rows, parts.reshape(rows.shape[0], -1)),
        )
        return wide.reshape(-1)[:n]

    found: Array = lax.map(one, (codes, scales))
    return found


def _word(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", "")))
