"""Keeps optimizer state in pinned host memory and brings it to the device for one layer of a weight
at a time.

A step is one program for the gradients, then one update program per layer of each stack. During an
update, the state of the next layer is copied to the device, and that of the layer before back to the
host. The first copy to the device starts when the gradients are done, and each further one when the
state of an earlier layer is back on the host. So the state of at most two layers is on the device. In
a single program XLA would schedule the copies, and for TPUs it brings the whole state back during the
forward pass. If the device is the host's processor, nothing is moved.

State on the host has the structure of the optimizer's state, but the moments of a stack (L, ...) are a
tuple over its layers, each (1, ...). Arrays that belong to no weight are step counts and stay on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from jax.tree_util import DictKey, SequenceKey

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole_jax.compiled.step import Backward, TrainState, chosen, counted
from memconsole_jax.layout.stacking import Stack
from memconsole_jax.tasks.task import Tree
from memconsole_jax.techniques.optimizer.optimizers import Part, transformation
from memconsole_jax.techniques.weights import precision
from memconsole_jax.techniques.weights.average import followed
from memconsole_jax.techniques.weights.rounding import Rounding

PINNED = "pinned_host"


def same_memory(kind: str) -> bool:
    """Whether a `kind` of device keeps its arrays in the host's memory."""
    return kind == "cpu"


def keeps_state_on_host(plan: Plan, kind: str) -> bool:
    """Whether the optimizer's state is in host memory between steps."""
    return plan.optimize.optimizer_offload != "none" and not same_memory(kind)


def split_layers(state: Any, stacks: Mapping[str, Stack]) -> Any:
    """The shapes of the optimizer's `state` on the host, where moments are split into layers."""

    def layers(path: Any, x: Any) -> Any:
        if not _is_moment(path) or not stacks[path[-1].key].layered:
            return x
        return tuple(jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for _ in range(x.shape[0]))

    return jax.tree_util.tree_map_with_path(layers, state)


def advance_step() -> Any:
    """Jitted (`TrainState.precision`, step counts, `Backward.finite`) -> precision and counts after the
    step."""

    def step(
        state: Array | None, counts: list[Array], finite: Array | None
    ) -> tuple[Array | None, list[Array]]:
        after = [c + 1 if finite is None else c + finite for c in counts]
        return precision.adapted(state, finite), after

    return jax.jit(step)


def update_step(plan: Plan, model: Model, stack: Stack) -> Any:
    """The update of one layer of `stack`, jitted: (`LayerArrays`, gradients of the stack, `Backward.factor`,
    `Backward.finite`, step counts and `TrainState.precision` before the step, rates (2,), layer) -> `LayerArrays`. It
    donates the first argument."""
    rounding = Rounding(plan, model)

    def of_layer(x: Array, layer: Array) -> Array:
        return lax.dynamic_index_in_dim(x, layer) if stack.layered else x

    def replaced(x: Array, new: Array, layer: Array) -> Array:
        if not stack.layered:
            return new.astype(x.dtype)
        return lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), layer, 0)

    def step(
        arrays: LayerArrays,
        gradients: Array,
        factor: Array,
        finite: Array | None,
        counts: list[Array],
        precision_state: Array | None,
        rates: Array,
        layer: Array,
    ) -> LayerArrays:
        rate, share = rates
        name, weight = stack.name, of_layer(arrays.weights, layer)
        rule = precision.in_float32(transformation(plan, model, Part(name, layer)))
        shapes = jax.eval_shape(rule.init, {name: weight})
        state = _layer_state(shapes, arrays.moments, counts, layer)
        clipped = of_layer(gradients, layer) * factor
        updates, after = rule.update({name: clipped}, state, {name: weight})
        updated = weight.astype(jnp.float32) - rate * updates[name]
        new = rounding(name, updated, weight.dtype, precision_state, layer), _moments(after)
        if finite is not None:
            new = chosen(finite, new, (weight, arrays.moments))
        average = arrays.average
        if average is not None:
            old = {name: of_layer(average, layer)}
            averages = followed(old, {name: new[0]}, counted(share, finite))
            average = replaced(average, averages[name], layer)
        return LayerArrays(replaced(arrays.weights, new[0], layer), average, new[1])

    return jax.jit(step, donate_argnums=0)


@dataclass(frozen=True)
class InitialState:
    """Makes the optimizer's state before the first step: zeros. The device never holds all of
    it."""

    layout: HostLayout

    def compile(self) -> InitialState:
        """Does nothing; there is nothing to compile."""
        return self

    def __call__(self, weights: Tree) -> Any:
        """The state, whatever the values of `weights`."""
        leaves, structure = jax.tree.flatten(self.layout.state)
        counts = set(self.layout.counts)
        return jax.tree.unflatten(
            structure,
            [
                jax.device_put(
                    np.zeros(x.shape, x.dtype),
                    self.layout.on_device if i in counts else self.layout.on_host,
                )
                for i, x in enumerate(leaves)
            ],
        )


class LayerArrays(NamedTuple):
    """The arrays that the update of one layer replaces."""

    weights: Array
    """The whole stack."""
    average: Array | None
    """The average of the whole stack, if there is one."""
    moments: list[Array]
    """The layer's moments, (1, ...) each; those of a weight outside the layers have the weight's shape."""


class LayerState(NamedTuple):
    """One layer of one stack, and where its moments are among the leaves of the optimizer's state."""

    name: str
    layer: int
    leaves: list[int]
    """Indices of the moments."""


@dataclass(frozen=True)
class HostLayout:
    """The layout of the optimizer's state on the host."""

    state: Any
    """The shapes of the state (see `split_layers`)."""
    names: tuple[str, ...]
    """Names of the trained stacks, in order."""
    device: Any

    @property
    def on_host(self) -> SingleDeviceSharding:
        """The sharding of state in pinned host memory."""
        return SingleDeviceSharding(self.device, memory_kind=PINNED)

    @property
    def on_device(self) -> SingleDeviceSharding:
        """The sharding of state in device memory."""
        return SingleDeviceSharding(self.device)

    @cached_property
    def counts(self) -> list[int]:
        """Indices of the step counts among the leaves."""
        leaves = jax.tree_util.tree_flatten_with_path(self.state)[0]
        return [i for i, (path, _) in enumerate(leaves) if not _is_moment(path)]

    @cached_property
    def layers(self) -> list[LayerState]:
        """Every layer of every stack, in the order of their updates."""
        leaves: dict[tuple[str, int], list[int]] = {}
        for i, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(self.state)[0]):
            if _is_moment(path):
                leaves.setdefault(_layer_of(path), []).append(i)
        found = [LayerState(name, layer, indices) for (name, layer), indices in leaves.items()]
        return sorted(found, key=lambda one: (self.names.index(one.name), one.layer))

    def bytes_of(self, layer: LayerState) -> int:
        """The bytes of a layer's moments."""
        leaves = jax.tree.leaves(self.state)
        return sum(leaves[i].size * leaves[i].dtype.itemsize for i in layer.leaves)


@dataclass(frozen=True)
class Lowered:
    """The lowered programs of a step whose optimizer state is on the host."""

    gradients: Any
    updates: Mapping[str, Any]
    """Update program by stack name."""
    advance: Any
    """See `advance_step`."""
    layout: HostLayout

    def compile(self) -> OffloadedStep:
        """Compile them for the device they were lowered for."""
        updates = {name: one.compile() for name, one in self.updates.items()}
        return OffloadedStep(self.gradients.compile(), updates, self.advance.compile(), self.layout)


class OffloadedStep:
    """A compiled step. Call it like `memconsole_jax.compiled.step.train_step`, or in two halves."""

    def __init__(
        self, gradients: Any, updates: Mapping[str, Any], advance: Any, layout: HostLayout
    ) -> None:
        self.backward = gradients
        """See `step.backward_pass`."""
        self._updates, self._advance, self._layout = updates, advance, layout
        layers = max(layer.layer for layer in layout.layers) + 1
        self._numbers = list(jnp.arange(layers, dtype=jnp.int32, device=layout.device))
        """The numbers of the layers, on the device."""

    def __call__(
        self, trained: TrainState, frozen: Tree, arrays: Tree, rates: Array
    ) -> tuple[TrainState, Array]:
        result = self.backward(trained.weights, trained.precision, frozen, arrays)
        return self.update(trained, result, rates), result.metrics

    def update(self, trained: TrainState, result: Backward, rates: Array) -> TrainState:
        """See `step.update_pass`. Empties `result.gradients`."""
        leaves, structure = jax.tree.flatten(trained.optimizer)
        counts = [leaves[i] for i in self._layout.counts]
        precision_after, counts_after = self._advance(trained.precision, counts, result.finite)
        for i, count in zip(self._layout.counts, counts_after, strict=True):
            leaves[i] = count
        jax.block_until_ready(result.metrics)
        weights, gradients = dict(trained.weights), result.gradients
        averages = None if trained.average is None else dict(trained.average)
        layers = self._layout.layers
        arriving = self._fetch(leaves, layers[0])  # moments on their way to the device
        leaving: list[Array] = []  # moments on their way to the host
        outdated: list[Array] = []  # their old values there
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            name, moments = layer.name, arriving
            jax.block_until_ready(leaving)
            for moment in outdated:
                moment.delete()
            arriving = [] if following is None else self._fetch(leaves, following)
            new = self._updates[name](
                LayerArrays(weights[name], None if averages is None else averages[name], moments),
                gradients[name],
                result.factor,
                result.finite,
                counts,
                trained.precision,
                rates,
                self._numbers[layer.layer],
            )
            weights[name] = new.weights
            if averages is not None:
                averages[name] = new.average
            if following is None or following.name != name:
                del gradients[name]
            leaving = jax.device_put(new.moments, self._layout.on_host)
            outdated = [leaves[i] for i in layer.leaves]
            for i, moment in zip(layer.leaves, leaving, strict=True):
                leaves[i] = moment
            del new, moments
        for moment in outdated:
            moment.delete()
        state = jax.tree.unflatten(structure, leaves)
        return TrainState(weights, state, precision_after, averages)

    def _fetch(self, leaves: Sequence[Array], layer: LayerState) -> list[Array]:
        """Begin to copy the moments of a layer to the device."""
        moments = [leaves[i] for i in layer.leaves]
        fetched: list[Array] = jax.device_put(moments, self._layout.on_device)
        return fetched


def _is_moment(path: Sequence[Any]) -> bool:
    """Whether the array at `path` of the state belongs to a weight: optax keeps those in dicts by name."""
    return any(isinstance(key, DictKey) for key in path)


def _layer_of(path: Sequence[Any]) -> tuple[str, int]:
    """Stack name and layer of the moment at `path`."""
    *_, key, last = path
    return (key.key, last.idx) if isinstance(last, SequenceKey) else (last.key, 0)


def _moments(state: Any) -> list[Array]:
    """The moments of a state, in the order of its leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [x for path, x in leaves if _is_moment(path)]


def _layer_state(
    shapes: Any, moments: Sequence[Array], counts: Sequence[Array], layer: Array
) -> Any:
    """The optimizer's state of one layer: its moments, and the step counts in the `shapes` that its rule expects."""
    moments_left, counts_left = iter(moments), iter(counts)

    def one(path: Any, shape: Any) -> Array:
        if _is_moment(path):
            return next(moments_left)
        count = next(counts_left)
        return count if count.shape == shape.shape else lax.dynamic_index_in_dim(count, layer)

    return jax.tree_util.tree_map_with_path(one, shapes)
