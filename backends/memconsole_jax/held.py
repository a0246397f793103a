"""Arrays that are put aside in host memory, so that the device has room for something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Released:
    """An array on the host, and where on the device it belongs. JAX takes it for a leaf of a tree."""

    array: NDArray[np.generic]
    sharding: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def delete(self) -> None:
        """There is nothing on the device."""


def release(tree: Any) -> Any:
    """`tree` with each array moved to the host, one after another; those that are there stay."""

    def one(x: Any) -> Released:
        if isinstance(x, Released):
            return x
        found = Released(np.array(x), x.sharding)
        x.delete()
        return found

    return jax.tree.map(one, tree)


def restore(tree: Any) -> Any:
    """`tree` with each array back on the device, bit for bit; those that are there stay."""

    def one(x: Any) -> Any:
        return jax.device_put(x.array, x.sharding) if isinstance(x, Released) else x

    return jax.tree.map(one, tree)


def is_released(tree: Any) -> bool:
    """Whether arrays of `tree` are on the host."""
    return any(isinstance(x, Released) for x in jax.tree.leaves(tree))
