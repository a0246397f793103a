"""The sharding of arrays: on one device, or over several.

`ddp`: every device holds all weights and its rows of a batch. `fsdp`: weights, gradients and
optimizer state are split, each along its longest axis that divides equally. XLA inserts the
exchanges between devices. `gathered` makes it gather weights where they are used, and `by_rows`
makes it split activations by rows; otherwise it might split them along another axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

AXIS = "devices"
_spread: ContextVar[Places | None] = ContextVar("spread", default=None)


@dataclass(frozen=True)
class Places:
    """The devices of one plan's programs."""

    devices: tuple[Any, ...]
    split: bool
    """Whether weights and optimizer state are split."""

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.devices, (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def whole(self) -> Any:
        """Every device holds the whole array."""
        return self._spec() if self.several else SingleDeviceSharding(self.devices[0])

    def rows(self, shape: Sequence[int], axis: int) -> Any:
        """Every device holds its rows, which lie along `axis`."""
        if not self.several or shape[axis] % self.count:
            return self.whole
        return self._spec(*[None] * axis, AXIS)

    def weight(self, shape: Sequence[int], *, layered: bool) -> Any:
        """The sharding of a weight, or of state of the same shape. Layers (L, ...) are not split along the first
        axis, because blocks use one layer after another."""
        axes = range(1 if layered else 0, len(shape))
        fitting = [axis for axis in axes if shape[axis] and shape[axis] % self.count == 0]
        if not self.split or not self.several or not fitting:
            return self.whole
        longest = max(fitting, key=lambda axis: shape[axis])
        return self._spec(*[None] * longest, AXIS)

    @contextmanager
    def programmed(self) -> Iterator[None]:
        """A context in which programs are made for these devices."""
        token = _spread.set(self if self.several else None)
        try:
            yield
        finally:
            _spread.reset(token)

    def _spec(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def put(array: Any, place: Any) -> jax.Array:
    """`array`, which every process has, with the sharding `place`: each process gives its own devices their parts."""
    if place.is_fully_addressable:
        return jax.device_put(array, place)
    whole = np.asarray(array)
    # A copy: a view would keep the whole array alive.
    return jax.make_array_from_callback(whole.shape, place, lambda part: whole[part].copy())


def put_to_replace(array: Any, place: Any) -> jax.Array:
    """`array` with the sharding `place`, for a program to which it is donated, as weights and state are to a step.

    On a CPU, XLA uses the memory of a NumPy array directly if it is aligned as XLA's own arrays. Such memory cannot be
    donated, so the program would allocate the array again. To avoid this, the array is copied to memory that is not
    aligned, and XLA then makes a copy of its own.
    """
    on_cpu = all(device.platform == "cpu" for device in place.device_set)
    if on_cpu and isinstance(array, np.ndarray) and array.ctypes.data % _ALIGNED == 0:
        array = _unaligned(array)
    return put(array, place)


_ALIGNED = 64
"""Bytes: where XLA's own arrays begin on a CPU (`xla::cpu::MinAlign`)."""


def _unaligned(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """A copy of `array` that begins a quarter of `_ALIGNED` after a multiple of it."""
    room = np.empty(array.nbytes + 2 * _ALIGNED, np.uint8)
    begin = -room.ctypes.data % _ALIGNED + _ALIGNED // 4
    found = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def is_elsewhere(array: jax.Array) -> bool:
    """Whether other processes hold parts of `array` that this one does not have."""
    return not array.is_fully_addressable and not array.is_fully_replicated


@jax.custom_vjp
def gathered(weight: jax.Array) -> jax.Array:
    """A weight, gathered on every device. Its gradient is added up over the devices, and each device keeps the
    share that it has of the weight."""
    places = _spread.get()
    return weight if places is None else jax.lax.with_sharding_constraint(weight, places.whole)


def shared_out(gradient: jax.Array) -> jax.Array:
    """The gradient of a weight outside the blocks, or of one layer's weight, sharded as `gathered` describes."""
    places = _spread.get()
    if places is None:
        return gradient
    place = places.weight(gradient.shape, layered=False)
    return jax.lax.with_sharding_constraint(gradient, place)


gathered.defvjp(lambda weight: (gathered(weight), None), lambda _, slope: (shared_out(slope),))


def rows_of_each(rows: int) -> int:
    """How many of a batch's `rows` each device computes."""
    places = _spread.get()
    return rows if places is None or rows % places.count else rows // places.count


def by_rows(x: jax.Array) -> jax.Array:
    """Activations (B, ...), split so that each device keeps its rows."""
    places = _spread.get()
    return x if places is None else jax.lax.with_sharding_constraint(x, places.rows(x.shape, 0))


def on_own_rows(
    function: Callable[..., tuple[Any, Any]], apart: tuple[jax.Array, ...], whole: tuple[Any, ...]
) -> tuple[Any, Any]:
    """`function(*apart, *whole)`, whose results are sums over rows, and arrays of rows. With several devices,
    each gets its rows of the arrays `apart`, and the sums are added up over devices.

    XLA itself would not split a loop over chunks of rows: every device would run it over all rows.
    """
    places = _spread.get()
    if places is None or apart[0].shape[0] % places.count:
        return function(*apart, *whole)

    def on_one(*arguments: Any) -> tuple[Any, Any]:
        sums, rows = function(*arguments)
        return jax.lax.psum(sums, AXIS), rows

    each, all_of_it = PartitionSpec(AXIS), PartitionSpec()
    given = (*(each for _ in apart), *(all_of_it for _ in whole))
    found: tuple[Any, Any] = jax.shard_map(
        on_one, mesh=places.mesh, in_specs=given, out_specs=(all_of_it, each), check_vma=False
    )(*apart, *whole)
    return found
