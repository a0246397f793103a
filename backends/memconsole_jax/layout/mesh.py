"""Where arrays are: on one device, or spread over several by what they are.

`ddp`: every device holds all weights and its rows of a batch. `fsdp`: weights, gradients and
optimizer state are split, each along its longest axis that divides equally. XLA puts in the
exchange between devices. `gathered` tells it to bring a block's weights together where they are
used, and to keep activations apart by rows: otherwise it might split the activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

AXIS = "devices"
Tree = TypeVar("Tree")
_spread: ContextVar[Mesh | None] = ContextVar("spread", default=None)


@dataclass(frozen=True)
class Places:
    """The devices of one plan's programs."""

    devices: tuple[Any, ...]
    split: bool
    """Whether weights and optimizer state are split."""

    @property
    def several(self) -> bool:
        return len(self.devices) > 1

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.devices, (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def whole(self) -> Any:
        """Every device holds the whole array."""
        return self._spec() if self.several else SingleDeviceSharding(self.devices[0])

    def rows(self, shape: Sequence[int], axis: int) -> Any:
        """Every device holds its rows, which lie along `axis`."""
        if not self.several or shape[axis] % len(self.devices):
            return self.whole
        return self._spec(*[None] * axis, AXIS)

    def weight(self, shape: Sequence[int], *, layered: bool) -> Any:
        """A weight, or state of the same shape. Layers (L, ...) are not split along the first axis,
        because blocks take one after another."""
        count = len(self.devices)
        axes = range(1 if layered else 0, len(shape))
        fitting = [axis for axis in axes if shape[axis] and shape[axis] % count == 0]
        if not self.split or not self.several or not fitting:
            return self.whole
        longest = max(fitting, key=lambda axis: shape[axis])
        return self._spec(*[None] * longest, AXIS)

    @contextmanager
    def programmed(self) -> Iterator[None]:
        """A context in which programs are made for these devices."""
        token = _spread.set(self.mesh if self.several else None)
        try:
            yield
        finally:
            _spread.reset(token)

    def _spec(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def put(array: Any, place: Any) -> jax.Array:
    """`array`, which every process has, at its `place`: each process gives its own devices their parts."""
    if place.is_fully_addressable:
        return jax.device_put(array, place)
    whole = np.asarray(array)
    # A copy: a view would keep the whole array alive.
    return jax.make_array_from_callback(whole.shape, place, lambda part: whole[part].copy())


def is_elsewhere(array: jax.Array) -> bool:
    """Whether other processes hold parts of `array` that this one does not have."""
    return not array.is_fully_addressable and not array.is_fully_replicated


def gathered(weights: Tree) -> Tree:
    """Weights, brought together on every device. Their gradients are added up over the devices."""
    mesh = _spread.get()
    if mesh is None:
        return weights
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), weights)


def by_rows(x: jax.Array) -> jax.Array:
    """Activations (B, ...), of which each device keeps its rows."""
    mesh = _spread.get()
    if mesh is None or x.shape[0] % mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(AXIS)))
