"""Keeps optimizer state in pinned host memory and brings it to the device for one layer of a weight
at a time.

A step is one program for the gradients, then one update program per layer of each stack. During an
update, the next layer's state is copied to the device and the last layer's back to the host. The host
fetches the first state when the gradients are done, and each further one when an earlier one has left,
so at most two are on the device. In a single program XLA would schedule the copies, and for TPUs it
brings the whole state back during the forward pass. If the device is the host's processor, nothing
is moved.

State on the host has the structure of the optimizer's state, but a stack's array is a tuple over
its layers, each (1, …). Arrays that belong to no weight are step counts and stay on the device.
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


def waits_on_host(plan: Plan, kind: str) -> bool:
    """Whether the optimizer's state is in host memory between steps."""
    return plan.optimize.optimizer_offload != "none" and not same_memory(kind)


def divided(state: Any, stacks: Mapping[str, Stack]) -> Any:
    """The shapes of the optimizer's `state` on the host."""

    def layers(path: Any, x: Any) -> Any:
        if not _is_moment(path) or not stacks[path[-1].key].layered:
            return x
        return tuple(jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for _ in range(x.shape[0]))

    return jax.tree_util.tree_map_with_path(layers, state)


def advance_step() -> Any:
    """Jitted (`TrainState.precision`, counts, `Backward.finite`) -> precision and counts after the
    step."""

    def step(
        state: Array | None, counts: list[Array], finite: Array | None
    ) -> tuple[Array | None, list[Array]]:
        after = [c + 1 if finite is None else c + finite for c in counts]
        return precision.adapted(state, finite), after

    return jax.jit(step)


def update_step(plan: Plan, model: Model, stack: Stack) -> Any:
    """Jitted (`Visited`, gradients of the stack, `Backward.factor`, `Backward.finite`, counts and
    `TrainState.precision` before the step, rates (2,), layer) -> `Visited`; donates the first
    argument."""
    rounding = Rounding(plan, model)

    def part(x: Array, layer: Array) -> Array:
        return lax.dynamic_index_in_dim(x, layer) if stack.layered else x

    def replaced(x: Array, new: Array, layer: Array) -> Array:
        if not stack.layered:
            return new.astype(x.dtype)
        return lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), layer, 0)

    def step(
        visited: Visited,
        gradients: Array,
        factor: Array,
        finite: Array | None,
        counts: list[Array],
        state_of_precision: Array | None,
        rates: Array,
        layer: Array,
    ) -> Visited:
        rate, share = rates
        name, weight = stack.name, part(visited.weights, layer)
        one = precision.in_float32(transformation(plan, model, Part(name, layer)))
        state = _of_part(jax.eval_shape(one.init, {name: weight}), visited.moments, counts, layer)
        clipped = part(gradients, layer) * factor
        updates, after = one.update({name: clipped}, state, {name: weight})
        wide = weight.astype(jnp.float32) - rate * updates[name]
        new = rounding(name, wide, weight.dtype, state_of_precision, layer), _moments(after)
        if finite is not None:
            new = chosen(finite, new, (weight, visited.moments))
        average = visited.average
        if average is not None:
            old = {name: part(average, layer)}
            whole = followed(old, {name: new[0]}, counted(share, finite))
            average = replaced(average, whole[name], layer)
        return Visited(replaced(visited.weights, new[0], layer), average, new[1])

    return jax.jit(step, donate_argnums=0)


@dataclass(frozen=True)
class FirstState:
    """Makes the optimizer's state before the first step: zeros. The device never holds all of
    it."""

    waiting: Waiting

    def compile(self) -> FirstState:
        """Does nothing; there is nothing to compile."""
        return self

    def __call__(self, weights: Tree) -> Any:
        """The state, whatever the values of `weights`."""
        leaves, structure = jax.tree.flatten(self.waiting.state)
        counts = set(self.waiting.counts)
        return jax.tree.unflatten(
            structure,
            [
                jax.device_put(
                    np.zeros(x.shape, x.dtype),
                    self.waiting.here if i in counts else self.waiting.host,
                )
                for i, x in enumerate(leaves)
            ],
        )


class Visited(NamedTuple):
    """The arrays that the update of one layer replaces."""

    weights: Array
    """The whole stack."""
    average: Array | None
    """The average of the whole stack, if there is one."""
    moments: list[Array]
    """The layer's moments, (1, …) each; of a weight outside the layers, in the weight's shape."""


class Visit(NamedTuple):
    """One layer of one stack, and the indices of its moments among the leaves of the state."""

    name: str
    layer: int
    places: list[int]


@dataclass(frozen=True)
class Waiting:
    """The layout of the optimizer's state on the host: shapes, weights and device."""

    state: Any
    names: tuple[str, ...]
    """Names of the trained stacks, in order."""
    device: Any

    @property
    def host(self) -> SingleDeviceSharding:
        """The sharding of state in pinned host memory."""
        return SingleDeviceSharding(self.device, memory_kind=PINNED)

    @property
    def here(self) -> SingleDeviceSharding:
        """The sharding of state in device memory."""
        return SingleDeviceSharding(self.device)

    @cached_property
    def counts(self) -> list[int]:
        """Indices of the step counts among the leaves."""
        leaves = jax.tree_util.tree_flatten_with_path(self.state)[0]
        return [i for i, (path, _) in enumerate(leaves) if not _is_moment(path)]

    @cached_property
    def visits(self) -> list[Visit]:
        """Every layer of every stack, in order."""
        places: dict[tuple[str, int], list[int]] = {}
        for i, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(self.state)[0]):
            if _is_moment(path):
                places.setdefault(_place_of(path), []).append(i)
        found = [Visit(name, layer, held) for (name, layer), held in places.items()]
        return sorted(found, key=lambda visit: (self.names.index(visit.name), visit.layer))

    def bytes_of(self, visit: Visit) -> int:
        """Bytes that a visit copies to the device."""
        leaves = jax.tree.leaves(self.state)
        return sum(leaves[i].size * leaves[i].dtype.itemsize for i in visit.places)


@dataclass(frozen=True)
class Lowered:
    """The lowered programs of a step whose optimizer state is on the host."""

    gradients: Any
    updates: Mapping[str, Any]
    """Update program by stack name."""
    advance: Any
    """See `advance_step`."""
    waiting: Waiting

    def compile(self) -> OffloadedStep:
        """Compile them for the device they were lowered for."""
        updates = {name: one.compile() for name, one in self.updates.items()}
        return OffloadedStep(
            self.gradients.compile(), updates, self.advance.compile(), self.waiting
        )


class OffloadedStep:
    """A compiled step. Call it like `memconsole_jax.compiled.step.train_step`, or in two halves."""

    def __init__(
        self, gradients: Any, updates: Mapping[str, Any], advance: Any, waiting: Waiting
    ) -> None:
        self.backward = gradients
        """See `step.backward_pass`."""
        self._updates, self._advance, self._waiting = updates, advance, waiting
        layers = max(visit.layer for visit in waiting.visits) + 1
        self._layers = list(jnp.arange(layers, dtype=jnp.int32, device=waiting.device))

    def __call__(
        self, trained: TrainState, frozen: Tree, arrays: Tree, rates: Array
    ) -> tuple[TrainState, Array]:
        found = self.backward(trained.weights, trained.precision, frozen, arrays)
        return self.update(trained, found, rates), found.metrics

    def update(self, trained: TrainState, found: Backward, rates: Array) -> TrainState:
        """See `step.update_pass`. Empties `found.gradients`."""
        leaves, structure = jax.tree.flatten(trained.optimizer)
        counts = [leaves[i] for i in self._waiting.counts]
        after, advanced = self._advance(trained.precision, counts, found.finite)
        for i, count in zip(self._waiting.counts, advanced, strict=True):
            leaves[i] = count
        jax.block_until_ready(found.metrics)
        weights, gradients = dict(trained.weights), found.gradients
        averages = None if trained.average is None else dict(trained.average)
        visits = self._waiting.visits
        arriving = self._fetched(leaves, visits[0])
        leaving: list[Array] = []
        gone: list[Array] = []
        for visit, following in zip(visits, [*visits[1:], None], strict=True):
            name, here = visit.name, arriving
            jax.block_until_ready(leaving)
            for moment in gone:
                moment.delete()
            arriving = [] if following is None else self._fetched(leaves, following)
            new = self._updates[name](
                Visited(weights[name], None if averages is None else averages[name], here),
                gradients[name],
                found.factor,
                found.finite,
                counts,
                trained.precision,
                rates,
                self._layers[visit.layer],
            )
            weights[name] = new.weights
            if averages is not None:
                averages[name] = new.average
            if following is None or following.name != name:
                del gradients[name]
            leaving = jax.device_put(new.moments, self._waiting.host)
            gone = [leaves[i] for i in visit.places]
            for i, moment in zip(visit.places, leaving, strict=True):
                leaves[i] = moment
            del new, here
        for moment in gone:
            moment.delete()
        state = jax.tree.unflatten(structure, leaves)
        return TrainState(weights, state, after, averages)

    def _fetched(self, leaves: Sequence[Array], visit: Visit) -> list[Array]:
        place = self._waiting.here
        found: list[Array] = jax.device_put([leaves[i] for i in visit.places], place)
        return found


def _is_moment(path: Sequence[Any]) -> bool:
    return any(isinstance(key, DictKey) for key in path)


def _place_of(path: Sequence[Any]) -> tuple[str, int]:
    """Stack name and layer of a moment."""
    *_, key, last = path
    return (key.key, last.idx) if isinstance(last, SequenceKey) else (last.key, 0)


def _moments(state: Any) -> list[Array]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [x for path, x in leaves if _is_moment(path)]


def _of_part(shapes: Any, moments: Sequence[Array], counts: Sequence[Array], layer: Array) -> Any:
    """The state of one part: its own moments, and the counts in the shapes that it expects."""
    left, steps = iter(moments), iter(counts)

    def one(path: Any, shape: Any) -> Array:
        if _is_moment(path):
            return next(left)
        count = next(steps)
        return count if count.shape == shape.shape else lax.dynamic_index_in_dim(count, layer)

    return jax.tree_util.tree_map_with_path(one, shapes)
