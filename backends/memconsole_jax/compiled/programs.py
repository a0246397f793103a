"""The engine's programs: the shapes of their arguments, and how they are lowered.

The engine compiles them for its device. The tracer may compile them for a device that is absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import Input, Task, task_for
from memconsole.plan.training.trained import frozen_names
from memconsole_jax.compiled import offload
from memconsole_jax.compiled.step import (
    Backward,
    TrainState,
    backward_pass,
    evaluation_step,
    train_step,
    update_pass,
)
from memconsole_jax.layout.mesh import DeviceMesh
from memconsole_jax.layout.stacking import Stack, stacked, stacks
from memconsole_jax.models import dropout
from memconsole_jax.tasks.task import Tree
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.techniques.optimizer.optimizers import transformation
from memconsole_jax.techniques.weights import precision
from memconsole_jax.techniques.weights.quantized_base import stored_shapes
from memconsole_trainer.techniques import loss_scale, rounding
from memconsole_trainer.techniques.adapters import stored_narrow, trained_parameters
from memconsole_trainer.techniques.average import is_averaged
from memconsole_trainer.techniques.base_storage import is_quantized
from memconsole_trainer.techniques.dropout import drops


@dataclass(frozen=True)
class Programs:
    """The programs of one plan's model on devices of a `kind` (cpu | gpu | rocm | tpu)."""

    plan: Plan
    model: Model
    trained: dict[str, Stack]
    """The weights that the optimizer updates, by stacked name."""
    frozen: dict[str, Stack]
    """All other weights: those of a frozen base, and those that the loss does not depend on."""
    kind: str
    mesh: DeviceMesh
    disk: Disk = field(default_factory=Disk)
    """Holds offloaded activations if the device is a CPU."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        model: Model,
        kind: str,
        device: Any,
        directory: Path | None = None,
    ) -> Programs:
        """The programs of `plan` on `device`, which may be a tuple of several. Files of offloaded
        activations go to `directory`, the run's. Raises ValueError if some layers of a weight are trained and others are
        not."""
        trained, whole = stacked(trained_parameters(plan, model)), stacks(model)
        frozen = {name: s for name, s in whole.items() if name not in trained}
        parted = [n for n, s in trained.items() if s.shape != whole.get(n, s).shape]
        if parted:
            raise ValueError(f"{parted[0]}: all layers of a weight are trained, or none is")
        devices = device if isinstance(device, tuple) else (device,)
        mesh = DeviceMesh(devices, fsdp=plan.optimize.sharding == "fsdp")
        return cls(plan, model, trained, frozen, kind, mesh, Disk(directory))

    @property
    def sharding(self) -> Any:
        """The sharding of an array that every device holds whole."""
        return self.mesh.replicated

    def sharding_of(self, name: str) -> Any:
        """The sharding of a weight."""
        stack = (self.trained | self.frozen)[name]
        return self.mesh.weight_sharding(stack.shape, layered=stack.layered)

    def is_rounded(self, name: str) -> bool:
        """Whether a weight is rounded to 16 bits when loaded: it is frozen and used in 16-bit
        compute, or it is trained in 16 bits."""
        first = (self.trained | self.frozen)[name].members[0]
        if rounding.is_rounded(self.plan, first):
            return True
        return first.name in self.base_names and stored_narrow(self.plan, first)

    @cached_property
    def base_names(self) -> frozenset[str]:
        """The canonical names of the weights of a frozen base; empty if the task trains every weight that the loss depends
        on."""
        return frozenset(frozen_names(self.plan, self.model))

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is stored as codes."""
        return is_quantized(self.plan, self.frozen[name].members[0])

    def dtype(self, name: str) -> Any:
        """The storage dtype of a weight. On a CPU rounded values stay in fp32, because XLA for CPUs
        would make fp32 copies of all 16-bit weights in each step."""
        narrow = self.is_rounded(name) and self.kind != "cpu"
        return precision.compute_dtype(self.plan) if narrow else jnp.float32

    @property
    def trained_shapes(self) -> dict[str, Any]:
        return {
            name: self.shape(stack.shape, self.dtype(name), self.sharding_of(name))
            for name, stack in self.trained.items()
        }

    @property
    def precision_shape(self) -> Any:
        """The shape of `step.TrainState.precision`."""
        if loss_scale.is_scaled(self.plan.optimize.precision):
            return self.shape((3,))
        rounds = self.plan.optimize.precision == "bf16-sr"
        return self.shape((), jnp.uint32) if rounds else None

    @property
    def average_shapes(self) -> dict[str, Any] | None:
        """The average of the trained weights, if the plan has one."""
        if not is_averaged(self.plan):
            return None
        return {
            name: self.shape(stack.shape, place=self.sharding_of(name))
            for name, stack in self.trained.items()
        }

    @property
    def frozen_shapes(self) -> dict[str, Any]:
        shapes: dict[str, Any] = {}
        for name, s in self.frozen.items():
            if self.is_quantized(name):
                codes = stored_shapes(s, self.plan.optimize.base_storage)
                shapes |= {n: self.shape(*described) for n, described in codes.items()}
            else:
                shapes[name] = self.shape(s.shape, self.dtype(name), self.sharding_of(name))
        return shapes

    @property
    def state_shapes(self) -> Any:
        """The optimizer's state, in its layout on the host if it is kept there."""
        state = jax.eval_shape(self._update.init, self.trained_shapes)
        if self.keeps_state_on_host:
            state = offload.split_layers(state, self.trained)
        return jax.tree_util.tree_map_with_path(self._state_shape, state)

    def _state_shape(self, path: Any, x: Any) -> jax.ShapeDtypeStruct:
        """The shape of one array of the state. An array with the shape of its weight is placed as that weight is."""
        names = (str(getattr(key, "key", "")) for key in path)
        weight = next((name for name in names if name in self.trained), None)
        same_shape = weight is not None and self.trained[weight].shape == x.shape
        return self.shape(
            x.shape, x.dtype, self.sharding_of(weight) if weight and same_shape else None
        )

    @property
    def keeps_state_on_host(self) -> bool:
        """Whether the optimizer's state is in host memory between steps."""
        return offload.keeps_state_on_host(self.plan, self.kind)

    @cached_property
    def task(self) -> Task:
        """What the plan trains the model to do."""
        return task_for(self.plan, self.model)

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """The arrays of a batch, as the task names them."""
        return self.task.inputs(self.plan, self.model)

    @property
    def batch_axes(self) -> tuple[int, int]:
        """Number of micro-batches of a step, and rows of each over all devices."""
        rows = self.plan.train.batch_size * len(self.mesh.devices)
        return self.plan.optimize.accumulation_steps, rows

    @property
    def evaluated_rows(self) -> int:
        """Rows of an evaluation batch over all devices."""
        return self.plan.evaluation_batch * len(self.mesh.devices)

    def arrays(self, *axes: int) -> dict[str, Any]:
        """Shapes of a batch whose arrays have the leading `axes`, the last of which are rows."""
        return {
            i.name: self.shape(
                (*axes, *i.shape), jnp.dtype(i.dtype), self.mesh.row_sharding(axes, len(axes) - 1)
            )
            for i in self.inputs
        }

    @property
    def trained_arrays(self) -> dict[str, Any]:
        """Shapes of the arrays of a training step: a batch, and the random bits of dropout."""
        shapes = self.arrays(*self.batch_axes)
        if drops(self.plan):
            shapes[dropout.BITS] = self.shape((self.batch_axes[0], 2), jnp.uint32)
        return shapes

    @property
    def evaluated_shapes(self) -> dict[str, Any]:
        """The weights that are evaluated: their average if there is one."""
        return self.average_shapes or self.trained_shapes

    def lower_initialize(self) -> Any:
        """Lower the program that makes the optimizer's first state."""
        if self.keeps_state_on_host:
            return offload.InitialState(self._host_layout)
        shardings = self._shardings_of(self.state_shapes)
        return jax.jit(self._update.init, out_shardings=shardings).lower(self.trained_shapes)

    def compiled_step(self, lowered: Any = None) -> FusedStep | offload.OffloadedStep:
        """Compile one optimizer step, which may be `lowered` already. Call the result like
        `step.train_step`."""
        compiled = (lowered or self.lower_train()).compile()
        return compiled if self.keeps_state_on_host else FusedStep(compiled, self)

    def lower_train(self) -> Any:
        """Lower one optimizer step: one program, or several if the optimizer's state is on the
        host."""
        if self.keeps_state_on_host:
            return self._lower_offloaded()
        shardings = self._shardings_of((self._state, self.shape((2,))))
        step = train_step(self.plan, self.model, self._update, self.disk, shardings)
        with self.mesh.active():
            return step.lower(
                self._state, self.frozen_shapes, self.trained_arrays, self.shape((2,))
            )

    def _shardings_of(self, shapes: Any) -> Any:
        """The shardings of a program's results that replace arrays of these `shapes`; None if there is one device."""
        if not self.mesh.is_distributed:
            return None
        return jax.tree.map(lambda x: x.sharding, shapes)

    def lower_backward(self) -> Any:
        """Lower only the backward pass of a step."""
        step = jax.jit(backward_pass(self.plan, self.model, self.disk))
        arrays = self.trained_arrays
        with self.mesh.active():
            return step.lower(self.trained_shapes, self.precision_shape, self.frozen_shapes, arrays)

    def lower_update(self, backward: Any) -> Any:
        """Lower only the update of a step. `backward` holds the shapes of `step.Backward`."""
        step = jax.jit(update_pass(self.plan, self.model, self._update), donate_argnums=0)
        return step.lower(self._state, backward, self.shape((2,)))

    @property
    def _state(self) -> TrainState:
        return TrainState(
            self.trained_shapes, self.state_shapes, self.precision_shape, self.average_shapes
        )

    def _lower_offloaded(self) -> offload.Lowered:
        """Lower the backward pass of a step, and the updates of weights whose state comes from the
        host."""
        weights, averages = self.trained_shapes, self.average_shapes or {}
        layout = self._host_layout
        leaves = jax.tree.leaves(layout.state)
        counts = [leaves[i] for i in layout.counts]
        backward = self.lower_backward()
        one, scaled = self.shape(()), loss_scale.is_scaled(self.plan.optimize.precision)
        finite = self.shape((), jnp.bool_) if scaled else None
        control = one, finite, counts, self.precision_shape
        updates = {}
        for layer in layout.layers:
            name = layer.name
            if name not in updates:
                moments = [leaves[i] for i in layer.leaves]
                arrays = offload.LayerArrays(weights[name], averages.get(name), moments)
                gradients = backward.out_info.gradients[name]
                gradient = self.shape(gradients.shape, gradients.dtype)
                step = offload.update_step(self.plan, self.model, self.trained[name])
                number = self.shape((), jnp.int32)
                updates[name] = step.lower(arrays, gradient, *control, self.shape((2,)), number)
        advance = offload.advance_step().lower(self.precision_shape, counts, finite)
        return offload.Lowered(backward, updates, advance, layout)

    @property
    def _host_layout(self) -> offload.HostLayout:
        (device,) = self.sharding.device_set
        names = tuple(self.trained)
        return offload.HostLayout(self.state_shapes, names, device)

    def lower_evaluate(self) -> Any:
        """Lower the evaluation of one batch."""
        arrays = self.arrays(self.evaluated_rows)
        sums = self.shape((2, 1 + self.task.sums(self.model)))
        step = evaluation_step(self.plan, self.model, self._shardings_of(sums))
        with self.mesh.active():
            return step.lower(sums, self.evaluated_shapes, self.frozen_shapes, arrays)

    @property
    def _update(self) -> Any:
        """The optimizer's rule: an `optax.GradientTransformation`."""
        return precision.in_float32(transformation(self.plan, self.model))

    def shape(
        self, shape: tuple[int, ...], dtype: Any = jnp.float32, place: Any = None
    ) -> jax.ShapeDtypeStruct:
        """The shape of an array at its `place`: by default, every device holds it."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place or self.sharding)


class FusedStep:
    """One optimizer step as one compiled program. Its two halves are compiled on first use."""

    def __init__(self, fused: Any, programs: Programs) -> None:
        self._fused, self._programs = fused, programs

    def __call__(
        self, trained: TrainState, frozen: Tree, arrays: Tree, rates: Any
    ) -> tuple[TrainState, jax.Array]:
        result: tuple[TrainState, jax.Array] = self._fused(trained, frozen, arrays, rates)
        return result

    @cached_property
    def backward(self) -> Any:
        """See `step.backward_pass`."""
        return self._lowered_backward.compile()

    def update(self, trained: TrainState, result: Backward, rates: Any) -> TrainState:
        """See `step.update_pass`."""
        new: TrainState = self._update(trained, result, rates)
        return new

    @cached_property
    def _update(self) -> Any:
        programs, result = self._programs, self._lowered_backward.out_info
        shapes = jax.tree.map(lambda x: programs.shape(x.shape, x.dtype), result)
        return programs.lower_update(shapes).compile()

    @cached_property
    def _lowered_backward(self) -> Any:
        return self._programs.lower_backward()
