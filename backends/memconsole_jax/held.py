"""Moves arrays to host memory and back, to free device memory for something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Released:
    """An array on the host with its original sharding. JAX treats it as a leaf of a tree."""

    array: NDArray[np.generic]
    sharding: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def delete(self) -> None:
        """Does nothing, because nothing is on the device."""


def release(tree: Any) -> Any:
    """Move each array of `tree` to the host, one after another. Arrays already there stay."""

    def one(x: Any) -> Released:
        if isinstance(x, Released):
            return x
        found = Released(np.array(x), x.sharding)
        x.delete()
        return found

    return jax.tree.map(one, tree)


def restore(tree: Any) -> Any:
    """Move each array of `tree` back to the device, bit for bit. Arrays already there stay."""

    def one(x: Any) -> Any:
        return jax.device_put(x.array, x.sharding) if isinstance(x, Released) else x

    return jax.tree.map(one, tree)


def is_released(tree: Any) -> bool:
    """Whether arrays of `tree` are on the host."""
    return any(isinstance(x, Released) for x in jax.tree.leaves(tree))
