"""Loads weights from their source to the device as the plan stores them, one array on the host at a
time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from memconsole.plan.plan import Plan
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.layout.mesh import put_donatable
from memconsole_jax.layout.stacking import Stack
from memconsole_jax.techniques.weights import quantized_base
from memconsole_trainer.techniques import adapters

Tensor = Callable[[str], NDArray[np.generic]]
"""Returns the tensor of a canonical name."""


class Loader:
    """Loads the stacks of one plan's model to the devices, with the shardings of its programs."""

    def __init__(self, plan: Plan, programs: Programs) -> None:
        self._plan, self._programs = plan, programs

    def load(self, stacks: Mapping[str, Stack], tensor: Tensor) -> dict[str, jax.Array]:
        """The arrays of `stacks`."""
        return {n: self._put(self._stored(n, s.gather(tensor)), n) for n, s in stacks.items()}

    def average(self, stacks: Mapping[str, Stack], tensor: Tensor) -> dict[str, jax.Array]:
        """The averages of `stacks`, which are never rounded."""
        return {name: self._put(stack.gather(tensor), name) for name, stack in stacks.items()}

    def base(self, stacks: Mapping[str, Stack], tensor: Tensor) -> dict[str, jax.Array]:
        """The arrays of a frozen base; some may be stored as codes."""
        storage = self._plan.optimize.base_storage
        loaded: dict[str, jax.Array] = {}
        for name, stack in stacks.items():
            if self._programs.is_quantized(name):
                arrays = quantized_base.gathered(stack, storage, tensor)
                loaded |= {n: self._put(array) for n, array in arrays.items()}
            else:
                loaded |= self.load({name: stack}, tensor)
        return loaded

    def _stored(self, name: str, array: NDArray[np.float32]) -> Any:
        """`array` in its storage precision: a weight of a frozen base is rounded to 16 bits if the
        plan computes in 16 bits."""
        if not self._programs.is_rounded(name):
            return array
        narrow = adapters.narrow_rounded(self._plan, array)
        dtype = self._programs.dtype(name)
        return narrow if dtype == jnp.float32 else narrow.astype(dtype)

    def _put(self, array: Any, name: str | None = None) -> jax.Array:
        sharding = self._programs.sharding_of(name) if name else self._programs.sharding
        return put_donatable(array, sharding)
