"""The engine's compiled programs over shapes alone: what they take, and how they are lowered.

The engine compiles them for its own device, the tracer for a device that need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole_jax import generate, offload
from memconsole_jax.stacking import Stack, stacked, stacks
from memconsole_jax.step import TrainState, evaluation_step, train_step
from memconsole_jax.techniques import precision
from memconsole_jax.techniques.activation_offload import Disk
from memconsole_jax.techniques.optimizers import transformation
from memconsole_jax.techniques.quantized_base import stored_shapes
from memconsole_trainer.techniques import loss_scale, rounding
from memconsole_trainer.techniques.adapters import stored_narrow, trained_parameters
from memconsole_trainer.techniques.average import is_averaged
from memconsole_trainer.techniques.base_storage import is_quantized


@dataclass(frozen=True)
class Programs:
    """One plan's model as shapes on one device of a `kind` (cpu | gpu | rocm | tpu)."""

    plan: Plan
    architecture: Architecture
    trained: dict[str, Stack]
    kept: dict[str, Stack]
    kind: str
    sharding: Any
    disk: Disk = field(default_factory=Disk)
    """Where activations of a CPU wait."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        architecture: Architecture,
        kind: str,
        device: Any,
        directory: Path | None = None,
    ) -> Programs:
        """`directory`: of the run, for what waits on disk while it trains."""
        trained = stacked(trained_parameters(plan, architecture))
        kept = {name: s for name, s in stacks(architecture).items() if name not in trained}
        place = jax.sharding.SingleDeviceSharding(device)
        return cls(plan, architecture, trained, kept, kind, place, Disk(directory))

    def is_rounded(self, name: str) -> bool:
        """Whether a weight is rounded to 16 bits when loaded: frozen and computed with in them, or trained in them."""
        if rounding.is_rounded(self.plan, (self.trained | self.kept)[name].members[0]):
            return True
        frozen = bool(self.plan.optimize.lora_rank) and name in self.kept
        return frozen and stored_narrow(self.plan, self.kept[name].members[0])

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is stored in codes."""
        return is_quantized(self.plan, self.kept[name].members[0])

    def dtype(self, name: str) -> Any:
        """What a weight is stored as. XLA for CPUs would widen all 16-bit weights to fp32 in each step,
        beside them: there the rounded values stay in fp32."""
        narrow = self.is_rounded(name) and self.kind != "cpu"
        return precision.compute_dtype(self.plan) if narrow else jnp.float32

    @property
    def trained_shapes(self) -> dict[str, Any]:
        found = self.trained.items()
        return {name: self._shape(stack.shape, self.dtype(name)) for name, stack in found}

    @property
    def precision_shape(self) -> Any:
        """The third part of `step.TrainState`."""
        if loss_scale.is_scaled(self.plan.optimize.precision):
            return self._shape((3,))
        rounds = self.plan.optimize.precision == "bf16-sr"
        return self._shape((), jnp.uint32) if rounds else None

    @property
    def average_shapes(self) -> dict[str, Any] | None:
        """The average of the trained weights, where the plan has one."""
        if not is_averaged(self.plan):
            return None
        return {name: self._shape(stack.shape) for name, stack in self.trained.items()}

    @property
    def kept_shapes(self) -> dict[str, Any]:
        shapes: dict[str, Any] = {}
        for name, s in self.kept.items():
            if self.is_quantized(name):
                found = stored_shapes(s, self.plan.optimize.base_storage)
                shapes |= {n: self._shape(*described) for n, described in found.items()}
            else:
                shapes[name] = self._shape(s.shape, self.dtype(name))
        return shapes

    @property
    def state_shapes(self) -> Any:
        """The optimizer's state, as it waits on the host where it does."""
        state = jax.eval_shape(self._update.init, self.trained_shapes)
        if self.waits_on_host:
            state = offload.divided(state, self.trained)
        return jax.tree.map(lambda x: self._shape(x.shape, x.dtype), state)

    @property
    def waits_on_host(self) -> bool:
        """Whether the optimizer's state is in host memory between steps."""
        return offload.waits_on_host(self.plan, self.kind)

    @property
    def row_shape(self) -> Any:
        """Token ids of a micro-batch, (B, T)."""
        return self._shape((self.plan.train.batch_size, self.plan.data.sequence_length), jnp.int32)

    @property
    def evaluation_row_shape(self) -> Any:
        """Token ids of an evaluation batch, (B, T)."""
        return self._shape((self.plan.evaluation_batch, self.plan.data.sequence_length), jnp.int32)

    def lower_initialize(self) -> Any:
        """The optimizer's first state, of the trained weights."""
        if self.waits_on_host:
            return offload.FirstState(self._waiting)
        return jax.jit(self._update.init).lower(self.trained_shapes)

    def lower_train(self) -> Any:
        """One optimizer step."""
        rows = self.row_shape
        many = self._shape((self.plan.optimize.accumulation_steps, *rows.shape), jnp.int32)
        documents = many if self.plan.data.isolate_documents else None
        if self.waits_on_host:
            return self._lower_apart(many, documents)
        state = TrainState(
            self.trained_shapes, self.state_shapes, self.precision_shape, self.average_shapes
        )
        step = train_step(self.plan, self.architecture, self._update, self.disk)
        return step.lower(state, self.kept_shapes, many, many, self._shape((2,)), documents)

    def _lower_apart(self, rows: Any, documents: Any) -> offload.Lowered:
        """The gradients of a step, and the updates of the weights whose state comes from the host."""
        weights, waiting, averages = self.trained_shapes, self._waiting, self.average_shapes or {}
        leaves = jax.tree.leaves(waiting.state)
        counts = [leaves[i] for i in waiting.counts]
        backward = offload.gradient_step(self.plan, self.architecture).lower(
            weights, self.precision_shape, counts, self.kept_shapes, rows, rows, documents
        )
        one, scaled = self._shape(()), loss_scale.is_scaled(self.plan.optimize.precision)
        finite = self._shape((), jnp.bool_) if scaled else None
        control = one, finite, counts, self.precision_shape
        updates = {}
        for visit in waiting.visits:
            name = visit.name
            if name not in updates:
                moments = [leaves[i] for i in visit.places]
                visited = offload.Visited(weights[name], averages.get(name), moments)
                made = backward.out_info[0].gradients[name]
                gradient = self._shape(made.shape, made.dtype)
                step = offload.update_step(self.plan, self.architecture, self.trained[name])
                layer = self._shape((), jnp.int32)
                updates[name] = step.lower(visited, gradient, *control, self._shape((2,)), layer)
        return offload.Lowered(backward, updates, waiting)

    @property
    def _waiting(self) -> offload.Waiting:
        (device,) = self.sharding.device_set
        names = tuple(self.trained)
        return offload.Waiting(self.state_shapes, names, device)

    def lower_evaluate(self) -> Any:
        """One evaluation batch."""
        rows = self.evaluation_row_shape
        step = evaluation_step(self.plan, self.architecture)
        documents = rows if self.plan.data.isolate_documents else None
        weights = self.average_shapes or self.trained_shapes
        return step.lower(self._shape((2,)), weights, self.kept_shapes, rows, rows, documents)

    def lower_sample(self, positions: int) -> Any:
        """Tokens after a prompt, in so many positions."""
        weights = {**(self.average_shapes or self.trained_shapes), **self.kept_shapes}
        count, share = self._shape((), jnp.int32), self._shape(())
        step = jax.jit(generate.sample, static_argnums=0)
        return step.lower(
            self.architecture,
            weights,
            self._shape((positions,), jnp.int32),
            count,
            count,
            share,
            count,
            self._shape((), jnp.uint32),
        )

    @property
    def _update(self) -> Any:
        return precision.in_float32(transformation(self.plan, self.architecture))

    def _shape(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)
