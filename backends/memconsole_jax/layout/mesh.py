"""The sharding of arrays: on one device, or over a mesh of several.

`ddp`: every device holds all weights and its rows of a batch. `fsdp`: weights, gradients and
optimizer state are split, each along its longest axis that divides equally. XLA inserts the
collectives. `all_gather` makes it gather weights where they are used, and `shard_rows`
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
"""The mesh's only axis."""
_active: ContextVar[DeviceMesh | None] = ContextVar("active", default=None)
"""The mesh of several devices that a program is traced for; None for one device."""


@dataclass(frozen=True)
class DeviceMesh:
    """The devices of one plan's programs, and the shardings of arrays over them."""

    devices: tuple[Any, ...]
    fsdp: bool
    """Whether weights and optimizer state are split."""

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def is_distributed(self) -> bool:
        """Whether there are several devices."""
        return self.count > 1

    @property
    def jax_mesh(self) -> Mesh:
        return Mesh(self.devices, (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def replicated(self) -> Any:
        """The sharding with which every device holds the whole array."""
        return self._named() if self.is_distributed else SingleDeviceSharding(self.devices[0])

    def row_sharding(self, shape: Sequence[int], axis: int) -> Any:
        """The sharding with which every device holds its rows, which lie along `axis`."""
        if not self.is_distributed or shape[axis] % self.count:
            return self.replicated
        return self._named(*[None] * axis, AXIS)

    def weight_sharding(self, shape: Sequence[int], *, layered: bool) -> Any:
        """The sharding of a weight, or of state of the same shape. Layers (L, ...) are not split along the first
        axis, because blocks use one layer after another."""
        axes = range(1 if layered else 0, len(shape))
        divisible = [axis for axis in axes if shape[axis] and shape[axis] % self.count == 0]
        if not self.fsdp or not self.is_distributed or not divisible:
            return self.replicated
        longest = max(divisible, key=lambda axis: shape[axis])
        return self._named(*[None] * longest, AXIS)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which programs are traced for these devices."""
        token = _active.set(self if self.is_distributed else None)
        try:
            yield
        finally:
            _active.reset(token)

    def _named(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.jax_mesh, PartitionSpec(*axes))


def put(array: Any, sharding: Any) -> jax.Array:
    """`array`, which every process has, on the devices: each process gives its own devices their parts."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    whole = np.asarray(array)
    # A copy: a view would keep the whole array alive.
    return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part].copy())


def put_donatable(array: Any, sharding: Any) -> jax.Array:
    """`put` for an array that will be donated to a program, as weights and state are to a step.

    On a CPU, XLA uses the memory of a NumPy array directly if it is aligned as XLA's own arrays. Such memory cannot be
    donated, so the program would allocate the array again. To avoid this, the array is copied to memory that is not
    aligned, and XLA then makes a copy of its own.
    """
    on_cpu = all(device.platform == "cpu" for device in sharding.device_set)
    if on_cpu and isinstance(array, np.ndarray) and array.ctypes.data % _ALIGNMENT == 0:
        array = _unaligned_copy(array)
    return put(array, sharding)


_ALIGNMENT = 64
"""Bytes: where XLA's own arrays begin on a CPU (`xla::cpu::MinAlign`)."""


def _unaligned_copy(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """A copy of `array` that begins a quarter of `_ALIGNMENT` after a multiple of it."""
    room = np.empty(array.nbytes + 2 * _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT + _ALIGNMENT // 4
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def spans_processes(array: jax.Array) -> bool:
    """Whether other processes hold parts of `array` that this one does not have."""
    return not array.is_fully_addressable and not array.is_fully_replicated


@jax.custom_vjp
def all_gather(weight: jax.Array) -> jax.Array:
    """A weight, gathered on every device. Its gradient is summed over the devices, and each device keeps the
    shard of the gradient that it has of the weight (a reduce-scatter)."""
    mesh = _active.get()
    return weight if mesh is None else jax.lax.with_sharding_constraint(weight, mesh.replicated)


def shard_gradient(gradient: jax.Array) -> jax.Array:
    """The gradient of a weight outside the blocks, or of one layer's weight, sharded as the weight is."""
    mesh = _active.get()
    if mesh is None:
        return gradient
    sharding = mesh.weight_sharding(gradient.shape, layered=False)
    return jax.lax.with_sharding_constraint(gradient, sharding)


all_gather.defvjp(
    lambda weight: (all_gather(weight), None), lambda _, gradient: (shard_gradient(gradient),)
)


def rows_per_device(rows: int) -> int:
    """How many of a batch's `rows` each device computes."""
    mesh = _active.get()
    return rows if mesh is None or rows % mesh.count else rows // mesh.count


def shard_rows(x: jax.Array) -> jax.Array:
    """Activations (B, ...), split so that each device keeps its rows."""
    mesh = _active.get()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, mesh.row_sharding(x.shape, 0))


def shard_map_rows(
    function: Callable[..., tuple[Any, Any]],
    sharded: tuple[jax.Array, ...],
    replicated: tuple[Any, ...],
) -> tuple[Any, Any]:
    """`function(*sharded, *replicated)`, whose two results are sums over rows, and arrays of rows. With several devices,
    each gets its rows of the `sharded` arrays, and the sums are added up over devices.

    XLA itself would not split a loop over chunks of rows: every device would run it over all rows.
    """
    mesh = _active.get()
    if mesh is None or sharded[0].shape[0] % mesh.count:
        return function(*sharded, *replicated)

    def on_one_device(*arguments: Any) -> tuple[Any, Any]:
        sums, rows = function(*arguments)
        return jax.lax.psum(sums, AXIS), rows

    by_row, whole = PartitionSpec(AXIS), PartitionSpec()
    results: tuple[Any, Any] = jax.shard_map(
        on_one_device,
        mesh=mesh.jax_mesh,
        in_specs=(*(by_row for _ in sharded), *(whole for _ in replicated)),
        out_specs=(whole, by_row),
        check_vma=False,
    )(*sharded, *replicated)
    return results
