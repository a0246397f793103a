"""The engine's compiled programs over shapes alone: what they take, and how they are lowered.

The engine compiles them for its own device, the tracer for a device that need not be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole_jax import generate, offload, precision
from memconsole_jax.optimizers import transformation
from memconsole_jax.quantized_base import stored_shapes
from memconsole_jax.stacking import Stack, stacked, stacks
from memconsole_jax.step import Trained, evaluation_step, train_step
from memconsole_trainer import loss_scale, rounding
from memconsole_trainer.adapters import stored_narrow, trained_parameters
from memconsole_trainer.average import is_averaged
from memconsole_trainer.base_storage import is_quantized


@dataclass(frozen=True)
class Programs:
    """One plan's model as shapes on one device of a `kind` (cpu | gpu | rocm | tpu)."""

    plan: Plan
    architecture: Architecture
    trained: dict[str, Stack]
    kept: dict[str, Stack]
    kind: str
    sharding: Any

    @classmethod
    def of(cls, plan: Plan, architecture: Architecture, kind: str, device: Any) -> Programs:
        trained = stacked(trained_parameters(plan, architecture))
        kept = {name: s for name, s in stacks(architecture).items() if name not in trained}
        place = jax.sharding.SingleDeviceSharding(device)
        return cls(plan, architecture, trained, kept, kind, place)

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
        """The third part of `step.Trained`."""
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
        """The optimizer's state."""
        state = jax.eval_shape(self._update.init, self.trained_shapes)
        shapes = jax.tree.map(lambda x: self._shape(x.shape, x.dtype), state)
        host = self.host_place
        if host is None:
            return shapes
        return jax.tree.map(lambda x: x.update(sharding=host) if x.ndim else x, shapes)

    @property
    def host_place(self) -> Any:
        """Where the optimizer's state waits in host memory; None where it stays on the device."""
        waits = offload.waits_on_host(self.plan, self.kind)
        (device,) = self.sharding.device_set
        return offload.on_host(device) if waits else None

    @property
    def row_shape(self) -> Any:
        """Token ids of a micro-batch, (B, T)."""
        return self._shape((self.plan.train.batch_size, self.plan.data.sequence_length), jnp.int32)

    @property
    def evaluation_row_shape(self) -> Any:
        """Token ids of an evaluation batch, (B, T)."""
        return self._shape((self.plan.evaluation_batch, self.plan.data.sequence_length), jnp.int32)

    def lower_initialize(self) -> Any:
        """The optimizer's first state."""
        host, init = self.host_place, self._update.init
        if host is None:
            return jax.jit(init).lower(self.trained_shapes)
        first = jax.jit(lambda weights: offload.moved(init(weights), host))
        return first.lower(self.trained_shapes)

    def lower_train(self) -> Any:
        """One optimizer step."""
        rows = self.row_shape
        many = self._shape((self.plan.optimize.accumulation_steps, *rows.shape), jnp.int32)
        state = Trained(
            self.trained_shapes, self.state_shapes, self.precision_shape, self.average_shapes
        )
        places = None if self.host_place is None else (self.sharding, self.host_place)
        step = train_step(self.plan, self.architecture, self._update, places)
        documents = many if self.plan.data.isolate_documents else None
        return step.lower(state, self.kept_shapes, many, many, self._shape((2,)), documents)

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
