"""The engine's arrays as the named tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from memconsole_jax.compiled.programs import Programs
from memconsole_jax.compiled.step import TrainState
from memconsole_jax.layout.mesh import put_donatable, spans_processes
from memconsole_jax.layout.stacking import Stack
from memconsole_jax.releasing import Released
from memconsole_jax.saved import optimizer_state
from memconsole_jax.saved.loading import Loader
from memconsole_jax.saved.optimizer_state import as_stored
from memconsole_trainer.engine import Array, StateSource, WeightsError
from memconsole_trainer.techniques import average, loss_scale


@dataclass(frozen=True)
class Saved:
    """The tensors in a checkpoint of these programs: all but those of a frozen base."""

    programs: Programs
    loader: Loader

    def tensors(
        self, trained: TrainState, frozen: dict[str, Any]
    ) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield every tensor, one at a time on the host."""
        for name, stack in self._weights.items():
            rounded = self.programs.is_rounded(name)
            array = frozen[name] if name in frozen else trained.weights[name]
            for canonical, row in self._parts(stack, array):
                yield f"model.{canonical}", row.astype(jnp.bfloat16) if rounded else row
        for name, stack in self._averaged(trained).items():
            for canonical, row in self._parts(stack, trained.average[name]):
                yield f"{average.PREFIX}{canonical}", row
        if loss_scale.is_scaled(self.programs.plan.optimize.precision):
            yield loss_scale.NAME, _host(trained.precision)
        for leaf in self._leaves(trained):
            for name, row in self._parts(leaf, leaf.array):
                yield name, as_stored(row)

    def names(self, trained: TrainState) -> Iterator[str]:
        """The names of these tensors."""
        for stack in self._weights.values():
            yield from (f"model.{p.name}" for p in stack.members)
        for stack in self._averaged(trained).values():
            yield from (f"{average.PREFIX}{p.name}" for p in stack.members)
        if loss_scale.is_scaled(self.programs.plan.optimize.precision):
            yield loss_scale.NAME
        for leaf in self._leaves(trained):
            yield from leaf.names()

    def frozen(self, source: StateSource) -> dict[str, jax.Array]:
        """The weights that are not trained, from a checkpoint without a frozen base."""
        return self.loader.load(self.programs.frozen, lambda name: source.tensor(f"model.{name}"))

    def trained(self, source: StateSource, before: TrainState, precision: Any) -> TrainState:
        """The state of training from a checkpoint. `before` has only the optimizer's state, whose arrays are
        deleted one by one."""
        stacks = self.programs.trained
        weights = self.loader.load(stacks, lambda name: source.tensor(f"model.{name}"))
        averages = None
        if average.is_averaged(self.programs.plan):
            averages = self.loader.average(
                stacks, lambda name: source.tensor(f"{average.PREFIX}{name}")
            )
        loaded = []
        for leaf in self._leaves(before):
            array, sharding = np.empty(leaf.array.shape, leaf.array.dtype), leaf.array.sharding
            leaf.array.delete()
            for name, row in leaf.split(array):
                values = source.tensor(name)
                if values.shape != row.shape:
                    raise WeightsError(f"{name}: shape {values.shape}, expected {row.shape}")
                as_stored(row)[...] = values
            loaded.append(put_donatable(array, sharding))
        structure = jax.tree.structure(before.optimizer)
        return TrainState(weights, jax.tree.unflatten(structure, loaded), precision, averages)

    def _parts(
        self, owner: Stack | optimizer_state.OptimizerLeaf, array: jax.Array | Released
    ) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield name and values of each tensor of `array`. If it is spread over several processes, one layer's
        tensor is gathered at a time, never those of all layers."""
        if isinstance(array, Released) or not spans_processes(array):
            yield from owner.split(_host(array))
            return
        stack = owner if isinstance(owner, Stack) else owner.stack
        layered = stack is not None and stack.layered
        for number, name in enumerate(owner.names()):
            gathered = self._layer(array, np.int32(number)) if layered else self._whole(array)
            yield name, np.asarray(gathered.addressable_data(0))

    @cached_property
    def _whole(self) -> Any:
        """Jitted: an array of several processes -> the whole array on all devices."""
        return jax.jit(lambda array: array, out_shardings=self.programs.sharding)

    @cached_property
    def _layer(self) -> Any:
        """Jitted: an array (L, ...) of several processes, layer -> the array of that layer on all devices."""
        take = partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        return jax.jit(take, out_shardings=self.programs.sharding)

    @property
    def _weights(self) -> dict[str, Any]:
        """The stacks of the weights that are saved: a frozen base stays where it came from."""
        has_frozen_base = bool(self.programs.base_names)
        return self.programs.trained | ({} if has_frozen_base else self.programs.frozen)

    def _averaged(self, trained: TrainState) -> dict[str, Any]:
        """The stacks that have an average. Their order is not that of `average`: JAX sorts keys."""
        return self.programs.trained if trained.average is not None else {}

    def _leaves(self, trained: TrainState) -> list[optimizer_state.OptimizerLeaf]:
        stacks = self.programs.trained | self.programs.frozen
        return optimizer_state.leaves(trained.optimizer, stacks)


def _host(array: jax.Array | Released) -> Array:
    """`array` on the host. On a CPU it is a view, which must be freed before the next step because
    a buffer with a view cannot be donated. Elsewhere it is a copy that JAX does not cache with the
    array."""
    if isinstance(array, Released):
        return array.array
    if not array.is_fully_addressable:
        return np.array(array.addressable_data(0))
    if len(array.sharding.device_set) > 1:
        whole = np.empty(array.shape, array.dtype)
        for part in array.addressable_shards:
            if part.replica_id == 0:
                whole[part.index] = np.asarray(part.data)
        return whole
    on_cpu = all(device.platform == "cpu" for device in array.devices())
    if on_cpu and array.dtype != jnp.bfloat16:  # NumPy's DLPack has no bfloat16
        return np.from_dlpack(array)
    return np.array(array)
