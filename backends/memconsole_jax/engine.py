"""The JAX engine: one jitted training step over stacked arrays, which it updates in place."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax
from numpy.typing import NDArray

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, Precision, replace
from memconsole.plan.sections.hybrid import GRADIENT_PHASES
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_jax import devices, releasing, tasks
from memconsole_jax.compiled import compile_cache, compiling
from memconsole_jax.compiled.compiling import Compiled
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.compiled.step import Backward, TrainState
from memconsole_jax.jumps import JaxJumps
from memconsole_jax.layout.mesh import put
from memconsole_jax.layout.stacking import Stack
from memconsole_jax.models import dropout
from memconsole_jax.process_group import join
from memconsole_jax.profiling import Recording
from memconsole_jax.saved.loading import Loader
from memconsole_jax.saved.tensors import Saved
from memconsole_jax.techniques.weights.average import first
from memconsole_trainer.engine import (
    GREEDY,
    STEP,
    Array,
    Batch,
    DeviceFacts,
    LossSum,
    MemoryReading,
    OnTokens,
    Part,
    ReleaseMode,
    Sampling,
    StateSource,
    StepMetrics,
    WeightSource,
    check_names,
)
from memconsole_trainer.host import mapped
from memconsole_trainer.jumps import phase_precision, saved_snapshots
from memconsole_trainer.process_group import ProcessGroup, SingleProcess
from memconsole_trainer.schedule import learning_rate
from memconsole_trainer.techniques import adapters, average, loss_scale
from memconsole_trainer.techniques.adapters import InitialAdapters
from memconsole_trainer.techniques.dropout import drops

STEPS_IN_FLIGHT = 2
"""Steps that the host may run ahead of the device. More would only queue batches."""


def create(plan: Plan, run_directory: Path | None) -> JaxEngine:
    """An engine for `plan` on this machine. Raises `PlanError` if the plan cannot run here."""
    devices.prepare(plan)
    compile_cache.enable_compile_cache()
    process_group = join(plan, run_directory)
    engine = JaxEngine(
        plan, devices.find_all(plan, process_group.size), run_directory, process_group
    )
    check_trainable(plan, engine.device.kind)  # the plan's device may be auto
    return engine


class JaxEngine:
    """Implements `memconsole_trainer.engine.Engine`."""

    def __init__(
        self,
        plan: Plan,
        jax_devices: tuple[Any, ...],
        run_directory: Path | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """`jax_devices` are the plan's `jax.Device`s, those of other processes included."""
        self._plan = plan
        self._run_directory = run_directory
        local = tuple(d for d in jax_devices if d.process_index == d.client.process_index())
        self._devices, device = jax_devices, local[0]
        jax.config.update("jax_default_device", device)
        self.process_group: ProcessGroup = process_group or SingleProcess()
        self.device: DeviceFacts = devices.facts(device)
        self.versions: Mapping[str, str] = {
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "flax": flax.__version__,
            "optax": optax.__version__,
        }
        self.parameters = 0
        self.trainable_parameters = 0
        self._memory = devices.DeviceMemory(local, self.device)
        self._compiling: Future[Compiled] | None = None
        self._step = 0
        self._unread: list[tuple[int, float, jax.Array]] = []
        """Number, learning rate and `Backward.metrics` of each step whose metrics are still on the device."""
        self._in_flight: deque[jax.Array] = deque()
        """The metrics of the steps that the device may not have finished."""

    def platform_lines(self) -> list[str]:
        return devices.platform_lines(self._plan, self.device)

    def prepare(self, plan: Plan, model: Model) -> None:
        """Begin to compile, from shapes alone. Several processes must compile in the same order, so they do
        it in `build`."""
        if self.process_group.size == 1:
            self._compiling = compiling.begin(self._programs_of(plan, model))

    def _programs_of(self, plan: Plan, model: Model) -> Programs:
        arguments = self.device.kind, self._devices, self._run_directory
        return Programs.of(plan, model, *arguments)

    def build(self, plan: Plan, model: Model, total_steps: int, weights: WeightSource) -> None:
        """See `Engine.build`. Compiles before anything is allocated, so that the compiler's memory is neither counted as
        the model's nor in use at the same time."""
        self._plan, self._total_steps = plan, total_steps
        begun, self._compiling = self._compiling, None
        compiled = begun.result() if begun is not None else None
        if compiled is None or compiled.programs.model != model:  # the data changed the model
            compiled = compiling.compile_all(self._programs_of(plan, model))
        self._programs = compiled.programs
        self._loader = Loader(plan, self._programs)
        self._saved = Saved(self._programs, self._loader)
        trained_stacks, frozen_stacks = self._programs.trained, self._programs.frozen
        self.trainable_parameters = _elements(trained_stacks)
        self.parameters = self.trainable_parameters + _elements(frozen_stacks)
        self._gradients: Backward | None = None
        self._use(compiled, model)
        self._memory.start()
        source = adapters.Fingerprinted(weights, self._programs.base_names)
        self._frozen = self._loader.base(frozen_stacks, source.tensor)
        self._base_fingerprint = source.fingerprint()
        if plan.optimize.lora_rank:
            weights = InitialAdapters(plan, model)
        trained = self._loader.load(trained_stacks, weights.tensor)
        averages = first(trained) if average.is_averaged(plan) else None
        state = self._initialize(trained)
        self._train_state = TrainState(trained, state, self._precision_state(None), averages)

    def _use(self, compiled: Compiled, model: Model) -> None:
        """Train with these compiled programs. Compiles those that only a hybrid plan needs."""
        self._initialize = compiled.initialize
        self._train_step = compiled.train_step
        self._evaluation_step = compiled.evaluation_step
        self._sampler = compiled.sampler
        self._steps = {self._plan.optimize.precision: self._train_step}
        self._jumps: JaxJumps | None = None
        if self._plan.hybrid.on:
            self._compile_hybrid(model)
        outputs = partial(tasks.of(self._plan, model).outputs, self._plan, model)
        self._outputs = jax.jit(outputs, out_shardings=self._programs.sharding)
        gc.collect()  # frees 13 MiB left by tracing and compiling

    def _compile_hybrid(self, model: Model) -> None:
        """Compile the steps of each precision that a phase computes in, and the loss of jumps."""
        plan = self._plan
        for precision in {phase_precision(plan, phase) for phase in GRADIENT_PHASES}:
            if precision not in self._steps:
                other = replace(plan, {"optimize.precision": precision})
                self._steps[precision] = self._programs_of(other, model).compiled_step()
        if plan.hybrid.memory != "none":
            releasing.warm_up(self._programs.state_shapes, plan.hybrid.memory)
        self._jumps = JaxJumps(
            self._programs, lambda: self._train_state.weights, lambda: self._frozen, self._put_batch
        )

    def train_step(self, batch: Batch) -> None:
        self._require("weights", "optimizer")
        self._gradients = None
        arrays = self._put_training_batch(batch)
        arguments = self._train_state, self._frozen, arrays, self._rates()
        self._train_state, metrics = self._programs.disk.ran(self._train_step, *arguments)
        self._finish_step(metrics)

    def backward(self, batch: Batch) -> None:
        self._require("weights")
        self._gradients = None  # free them before the next ones are computed
        arrays = self._put_training_batch(batch)
        arguments = self._train_state.weights, self._train_state.precision, self._frozen, arrays
        self._gradients = self._programs.disk.ran(self._train_step.backward, *arguments)

    def update(self) -> None:
        self._require("weights", "optimizer", "gradients")
        backward, self._gradients = self._gradients, None
        if backward is None:
            raise RuntimeError("there are no gradients to update with: call backward first")
        self._train_state = self._train_step.update(self._train_state, backward, self._rates())
        self._finish_step(backward.metrics)

    def release(self, part: Part, mode: ReleaseMode = "cpu") -> None:
        self.synchronize()
        self._move(part, partial(releasing.release, mode=mode))

    def fetch(self, part: Part) -> None:
        """Begin to bring a released `part` back. JAX copies and decodes asynchronously."""
        self.restore(part)

    def restore(self, part: Part) -> None:
        self._move(part, releasing.restore)

    @property
    def jumps(self) -> JaxJumps:
        """Snapshots and jumps. Raises `RuntimeError` if the plan predicts no weights."""
        if self._jumps is None:
            raise RuntimeError("the plan predicts no weights: hybrid.mode is off")
        return self._jumps

    def restart_average(self) -> None:
        """Set the average of the weights, if there is one, to the weights."""
        if self._train_state.average is not None:
            self._train_state = self._train_state._replace(average=first(self._train_state.weights))

    def compute_in(self, compute: Precision) -> None:
        """Compute all further gradient steps in this precision."""
        self._train_step = self._steps[compute]

    def count_step(self, loss: float) -> None:
        """Count a step that updated nothing, and report its mean `loss`."""
        rate = learning_rate(self._step, self._plan, self._total_steps)
        self._unread.append((self._step, rate, self._put(np.array([loss, np.nan], np.float32))))
        self._step += 1

    def _move(self, part: Part, move: Callable[[Any], Any]) -> None:
        trained = self._train_state
        if part == "gradients":
            self._gradients = move(self._gradients)
        elif part == "optimizer":
            self._train_state = trained._replace(optimizer=move(trained.optimizer))
        else:
            weights, averages = move(trained.weights), move(trained.average)
            self._train_state = trained._replace(weights=weights, average=averages)
            self._frozen = move(self._frozen)

    def _require(self, *parts: Part) -> None:
        """Raise `RuntimeError` if one of these parts is released."""
        parts_of = {
            "weights": self._train_state.weights,
            "optimizer": self._train_state.optimizer,
            "gradients": self._gradients,
        }
        for part in parts:
            if releasing.is_released(parts_of[part]):
                raise RuntimeError(f"{part} of the model are released: restore them first")

    def _rates(self) -> jax.Array:
        """The learning rate of this step, and the share of the new weights in their average: (2,), float32."""
        rate = learning_rate(self._step, self._plan, self._total_steps)
        return self._put(np.array([rate, average.share(self._plan, self._step)], np.float32))

    def _finish_step(self, metrics: jax.Array) -> None:
        rate = learning_rate(self._step, self._plan, self._total_steps)
        self._unread.append((self._step, rate, metrics))
        self._step += 1
        self._in_flight.append(metrics)
        if len(self._in_flight) > STEPS_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()

    def take_metrics(self) -> list[StepMetrics]:
        unread, self._unread = self._unread, []
        values = jax.device_get([metrics for _, _, metrics in unread])
        return [
            StepMetrics(
                step + 1, float(loss), float(norm), rate, float(scale[0]) if scale else None
            )
            for (step, rate, _), (loss, norm, *scale) in zip(unread, values, strict=True)
        ]

    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        self._require("weights")
        rows = self._programs.evaluated_rows
        entries = 1 + self._programs.task.sums(self._programs.model)
        sums, weight = self._put(np.zeros((2, entries), np.float32)), 0.0
        for batch in batches:
            weight += batch.weight
            for arrays in batch.micro_batches():
                arguments = self._evaluation_weights, self._frozen, self._put_batch(arrays, rows)
                sums = self._evaluation_step(sums, *arguments)
        totals, errors = np.asarray(sums, np.float64)  # see `step.evaluation_step`
        loss, *measures = map(float, totals - errors)
        return LossSum(loss, weight, tuple(measures))

    def outputs(self, batch: Batch) -> Array:
        """See `Engine.outputs`. Compiles once for each number of rows."""
        self._require("weights")
        (arrays,) = batch.micro_batches()
        rows = len(next(iter(arrays.values())))
        with self._programs.mesh.active():
            outputs = self._outputs(
                self._evaluation_weights | self._frozen, self._put_batch(arrays, rows)
            )
        return np.asarray(outputs)

    def generate(
        self,
        prompt: list[int],
        tokens: int,
        sampling: Sampling = GREEDY,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        self._require("weights")
        if self._sampler is None:
            raise ValueError("this model cannot generate text")
        return self._sampler(
            self._evaluation_weights | self._frozen, prompt, tokens, sampling, on_tokens
        )

    def state(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        yield STEP, np.array(self._step, np.int64)
        if self._base_fingerprint is not None:
            yield adapters.FINGERPRINT, self._base_fingerprint
        yield from self._saved.tensors(self._train_state, self._frozen)
        if self._jumps is not None:
            yield from self._jumps.tensors()

    def load_state(self, source: StateSource) -> None:
        self.synchronize()
        base = () if self._base_fingerprint is None else (adapters.FINGERPRINT,)
        snapshots = () if self._jumps is None else saved_snapshots(source).names
        check_names(source, (STEP, *base, *self._saved.names(self._train_state), *snapshots))
        if self._base_fingerprint is not None:
            adapters.check_base(self._base_fingerprint, source.tensor(adapters.FINGERPRINT))
        self._step = int(source.tensor(STEP))
        self._unread.clear()
        self._in_flight.clear()
        self._gradients = None
        # Free the weights before loading.
        self._train_state = TrainState({}, self._train_state.optimizer)
        if self._base_fingerprint is None:
            self._frozen = {}
            self._frozen = self._saved.frozen(source)
        precision = self._precision_state(
            source.tensor(loss_scale.NAME) if self._has_loss_scale else None
        )
        self._train_state = self._saved.trained(source, self._train_state, precision)
        if self._jumps is not None:
            self._jumps.load(source)

    def memory(self) -> MemoryReading:
        return self._memory.reading()

    def memories(self) -> tuple[MemoryReading, ...]:
        return self._memory.readings()

    def reset_peak(self) -> None:
        self._memory.reset_peak()

    def synchronize(self) -> None:
        jax.block_until_ready((self._train_state, self._gradients))

    def profile(self, folder: Path) -> Recording:
        return Recording(folder)

    @property
    def _evaluation_weights(self) -> dict[str, jax.Array]:
        """The weights to evaluate: their average if there is one."""
        averages: dict[str, jax.Array] | None = self._train_state.average
        return averages or self._train_state.weights

    @property
    def _has_loss_scale(self) -> bool:
        return loss_scale.is_scaled(self._plan.optimize.precision)

    def _precision_state(self, stored: Any) -> Any:
        """`TrainState.precision` at the current step; `stored` is the loss scale of a checkpoint, None for a new one."""
        if self._has_loss_scale:
            state = loss_scale.start() if stored is None else stored
            return self._put(np.array(state, np.float32))
        rounds = self._plan.optimize.precision == "bf16-sr"
        return self._put(np.uint32(self._step)) if rounds else None

    def _put_batch(self, arrays: Mapping[str, Array], *axes: int) -> dict[str, jax.Array]:
        """Put the arrays of a batch on the devices. Their leading axes are padded to the sizes `axes`, so that shapes
        never change."""
        placed = {}
        for described in self._programs.inputs:
            array = arrays[described.name]
            filled = mapped.empty((*axes, *described.shape), described.dtype)
            if described.fill:
                filled.fill(described.fill)
            filled[tuple(slice(n) for n in array.shape[: len(axes)])] = array
            place = self._programs.mesh.row_sharding(axes, len(axes) - 1)
            placed[described.name] = put(filled, place)
        return placed

    def _put_training_batch(self, batch: Batch) -> dict[str, jax.Array]:
        """Put what a training step reads on the devices: a batch, and the random bits of dropout."""
        placed = self._put_batch(batch.arrays, *self._programs.batch_axes)
        if drops(self._plan):
            placed[dropout.BITS] = self._put(dropout.bits_of_step(self._plan, self._step))
        return placed

    def _put(self, array: Any) -> jax.Array:
        """Put the whole `array` on every device."""
        return put(array, self._programs.sharding)


def _elements(stacks: Mapping[str, Stack]) -> int:
    """Elements of all weights in these stacks."""
    return sum(parameter.size for stack in stacks.values() for parameter in stack.members)
