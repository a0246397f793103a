"""Where arrays are: on one device, or spread over several by what they are.

`ddp`: every device holds all weights and its rows of a batch. `fsdp`: weights, gradients and
optimizer state are split, each along its longest axis that divides equally. XLA puts in the
exchange between devices. `gathered` tells it to bring weights together where they are used, and
`by_rows` to keep activations apart by rows: otherwise it might split the activations.
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
        """A weight, or state of the same shape. Layers (L, ...) are not split along the first axis,
        because blocks take one after another."""
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
    """`array`, which every process has, at its `place`: each process gives its own devices their parts."""
    if place.is_fully_addressable:
        return jax.device_put(array, place)
    whole = np.asarray(array)
    # A copy: a view would keep the whole array alive.
    return jax.make_array_from_callback(whole.shape, place, lambda part: whole[part].copy())


def put_to_replace(array: Any, place: Any) -> jax.Array:
    """`array` at its `place`, for a program that replaces it: a step takes over the memory of weights and state.

    On a CPU, XLA uses the memory of a NumPy array itself if it is aligned as XLA's own. No program can take that over,
    and so it would hold the array twice. A copy is then made that is not aligned, and XLA copies that one.
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
    """A weight, brought together on every device. Its gradient is added up over the devices, and
    each keeps the share that it has of the weight."""
    places = _spread.get()
    return weight if places is None else jax.lax.with_sharding_constraint(weight, places.whole)


def shared_out(gradient: jax.Array) -> jax.Array:
    """The gradient of a weight outside of blocks or of one layer, as `gathered` says."""
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
    """Activations (B, ...), of which each device keeps its rows."""
    places = _spread.get()
    return x if places is None else jax.lax.with_sharding_constraint(x, places.rows(x.shape, 0))


def on_own_rows(
    function: Callable[..., tuple[Any, Any]], apart: tuple[jax.Array, ...], whole: tuple[Any, ...]
) -> tuple[Any, Any]:
    """`function(*apart, *whole)`, whose results are sums over rows, and arrays of rows. Of several
    devices each gets its rows of the arrays `apart`, and the sums are added up.

    XLA itself would not keep a loop over pieces of all rows apart: every device would run it over
    the rows of all.
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
