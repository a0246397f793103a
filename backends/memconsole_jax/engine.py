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
from memconsole_jax import devices, held, tasks
from memconsole_jax.compiled import compiling
from memconsole_jax.compiled.compiling import Compiled
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.compiled.step import Backward, TrainState
from memconsole_jax.gang import join
from memconsole_jax.jumps import JaxJumps
from memconsole_jax.layout.mesh import put
from memconsole_jax.models import dropout
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
    Keeping,
    LossSum,
    MemoryReading,
    OnTokens,
    Part,
    Sampling,
    StateSource,
    StepMetrics,
    WeightSource,
    check_names,
)
from memconsole_trainer.gang import Alone, Gang
from memconsole_trainer.host import mapped
from memconsole_trainer.jumps import phase_precision, saved_snapshots
from memconsole_trainer.schedule import learning_rate
from memconsole_trainer.techniques import adapters, average, loss_scale
from memconsole_trainer.techniques.adapters import InitialAdapters
from memconsole_trainer.techniques.dropout import drops

STEPS_IN_FLIGHT = 2
"""Steps that the host may run ahead of the device. More would only queue batches."""


def create(plan: Plan, run_directory: Path | None) -> JaxEngine:
    """An engine for `plan` on this machine. Raises `PlanError` if the plan cannot run here."""
    devices.prepare(plan)
    devices.keep_compilations()
    gang = join(plan, run_directory)
    found = JaxEngine(plan, devices.found(plan, gang.size), run_directory, gang)
    check_trainable(plan, found.device.kind)  # the plan's device may be auto
    return found


class JaxEngine:
    """Implements `memconsole_trainer.engine.Engine`."""

    def __init__(
        self,
        plan: Plan,
        found: tuple[Any, ...],
        run_directory: Path | None = None,
        gang: Gang | None = None,
    ) -> None:
        self._plan = plan
        self._run_directory = run_directory
        own = tuple(d for d in found if d.process_index == d.client.process_index())
        self._devices, device = found, own[0]
        jax.config.update("jax_default_device", device)
        self.gang: Gang = gang or Alone()
        self.device: DeviceFacts = devices.facts(device)
        self.versions: Mapping[str, str] = {
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "flax": flax.__version__,
            "optax": optax.__version__,
        }
        self.parameters = 0
        self.trainable_parameters = 0
        self._memory = devices.DeviceMemory(own, self.device)
        self._compiling: Future[Compiled] | None = None
        self._step = 0
        self._unread: list[tuple[int, float, jax.Array]] = []
        self._in_flight: deque[jax.Array] = deque()

    def platform_lines(self) -> list[str]:
        return devices.platform_lines(self._plan, self.device)

    def prepare(self, plan: Plan, model: Model) -> None:
        """Begin to compile, from shapes alone. Several processes must compile in the same order, so they do
        it in `build`."""
        if self.gang.size == 1:
            self._compiling = compiling.begun(self._programs_of(plan, model))

    def _programs_of(self, plan: Plan, model: Model) -> Programs:
        arguments = self.device.kind, self._devices, self._run_directory
        return Programs.of(plan, model, *arguments)

    def build(self, plan: Plan, model: Model, total_steps: int, weights: WeightSource) -> None:
        """Compile before anything is allocated, so that the compiler's memory is neither counted as the
        model's nor held at the same time."""
        self._plan, self._total_steps = plan, total_steps
        begun, self._compiling = self._compiling, None
        compiled = begun.result() if begun is not None else None
        if compiled is None or compiled.programs.model != model:  # the data changed the model
            compiled = compiling.compiled(self._programs_of(plan, model))
        self._programs = compiled.programs
        self._loader = Loader(plan, self._programs)
        self._trained_stacks, self._kept_stacks = self._programs.trained, self._programs.kept
        self._saved = Saved(self._programs, self._loader)
        stacks = self._trained_stacks | self._kept_stacks
        members = {n: sum(p.size for p in s.members) for n, s in stacks.items()}
        self.parameters = sum(members.values())
        self.trainable_parameters = sum(members[n] for n in self._trained_stacks)
        self._gradients: Backward | None = None
        self._take(compiled, model)
        self._memory.start()
        source = adapters.Fingerprinted(weights, self._programs.frozen)
        self._kept = self._loader.base(self._kept_stacks, source.tensor)
        self._base = source.fingerprint()
        if plan.optimize.lora_rank:
            weights = InitialAdapters(plan, model)
        trained = self._loader.load(self._trained_stacks, weights.tensor)
        averages = first(trained) if average.is_averaged(plan) else None
        state = self._initialize(trained)
        self._trained = TrainState(trained, state, self._precision(None), averages)

    def _take(self, compiled: Compiled, model: Model) -> None:
        """Use the compiled programs, and compile those that only a hybrid plan needs."""
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
            held.prepare(self._programs.state_shapes, plan.hybrid.memory)
        self._jumps = JaxJumps(
            self._programs, lambda: self._trained.weights, lambda: self._kept, self._arrays
        )

    def train_step(self, batch: Batch) -> None:
        self._need("weights", "optimizer")
        self._gradients = None
        arrays = self._trained_arrays(batch)
        arguments = self._trained, self._kept, arrays, self._rates()
        self._trained, metrics = self._programs.disk.ran(self._train_step, *arguments)
        self._finish_step(metrics)

    def backward(self, batch: Batch) -> None:
        self._need("weights")
        self._gradients = None  # free them before the next ones are computed
        arrays = self._trained_arrays(batch)
        arguments = self._trained.weights, self._trained.precision, self._kept, arrays
        self._gradients = self._programs.disk.ran(self._train_step.backward, *arguments)

    def update(self) -> None:
        self._need("weights", "optimizer", "gradients")
        found, self._gradients = self._gradients, None
        if found is None:
            raise RuntimeError("there are no gradients to update with: call backward first")
        self._trained = self._train_step.update(self._trained, found, self._rates())
        self._finish_step(found.metrics)

    def release(self, part: Part, keeping: Keeping = "cpu") -> None:
        self.synchronize()
        self._move(part, partial(held.release, keeping=keeping))

    def fetch(self, part: Part) -> None:
        """Begin to bring a released `part` back. JAX copies and decodes asynchronously."""
        self.restore(part)

    def restore(self, part: Part) -> None:
        self._move(part, held.restore)

    @property
    def jumps(self) -> JaxJumps:
        """Snapshots and jumps. Raises `RuntimeError` if the plan predicts no weights."""
        if self._jumps is None:
            raise RuntimeError("the plan predicts no weights: hybrid.mode is off")
        return self._jumps

    def restart_average(self) -> None:
        """Set the average of the weights, if there is one, to the weights."""
        if self._trained.average is not None:
            self._trained = self._trained._replace(average=first(self._trained.weights))

    def compute_in(self, compute: Precision) -> None:
        """Compute all further gradient steps in this precision."""
        self._train_step = self._steps[compute]

    def count_step(self, loss: float) -> None:
        """Count a step that updated nothing, and report its mean `loss`."""
        rate = learning_rate(self._step, self._plan, self._total_steps)
        self._unread.append((self._step, rate, self._put(np.array([loss, np.nan], np.float32))))
        self._step += 1

    def _move(self, part: Part, move: Callable[[Any], Any]) -> None:
        trained = self._trained
        if part == "gradients":
            self._gradients = move(self._gradients)
        elif part == "optimizer":
            self._trained = trained._replace(optimizer=move(trained.optimizer))
        else:
            weights, averages = move(trained.weights), move(trained.average)
            self._trained = trained._replace(weights=weights, average=averages)
            self._kept = move(self._kept)

    def _need(self, *parts: Part) -> None:
        parts_of = {
            "weights": self._trained.weights,
            "optimizer": self._trained.optimizer,
            "gradients": self._gradients,
        }
        for part in parts:
            if held.is_released(parts_of[part]):
                raise RuntimeError(f"{part} of the model are released: restore them first")

    def _rates(self) -> jax.Array:
        """The learning rate of this step, and the share of the new weights in their average."""
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
        self._need("weights")
        rows = self._programs.evaluated_rows
        entries = 1 + self._programs.task.sums(self._programs.model)
        sums, weight = self._put(np.zeros((2, entries), np.float32)), 0.0
        for batch in batches:
            weight += batch.weight
            for arrays in batch.micro_batches():
                arguments = self._evaluated, self._kept, self._arrays(arrays, rows)
                sums = self._evaluation_step(sums, *arguments)
        totals, lost = np.asarray(sums, np.float64)
        loss, *measures = map(float, totals - lost)
        return LossSum(loss, weight, tuple(measures))

    def outputs(self, batch: Batch) -> Array:
        """Compiled once for each number of rows."""
        self._need("weights")
        (arrays,) = batch.micro_batches()
        rows = len(next(iter(arrays.values())))
        with self._programs.places.programmed():
            found = self._outputs(self._evaluated | self._kept, self._arrays(arrays, rows))
        return np.asarray(found)

    def generate(
        self,
        prompt: list[int],
        tokens: int,
        sampling: Sampling = GREEDY,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        self._need("weights")
        if self._sampler is None:
            raise ValueError("this model cannot generate text")
        return self._sampler(self._evaluated | self._kept, prompt, tokens, sampling, on_tokens)

    def state(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        yield STEP, np.array(self._step, np.int64)
        if self._base is not None:
            yield adapters.FINGERPRINT, self._base
        yield from self._saved.tensors(self._trained, self._kept)
        if self._jumps is not None:
            yield from self._jumps.tensors()

    def load_state(self, source: StateSource) -> None:
        self.synchronize()
        base = () if self._base is None else (adapters.FINGERPRINT,)
        own = () if self._jumps is None else saved_snapshots(source).names
        check_names(source, (STEP, *base, *self._saved.names(self._trained), *own))
        if self._base is not None:
            adapters.check_base(self._base, source.tensor(adapters.FINGERPRINT))
        self._step = int(source.tensor(STEP))
        self._unread.clear()
        self._in_flight.clear()
        self._gradients = None
        # Free the weights before loading.
        self._trained = TrainState({}, self._trained.optimizer)
        if self._base is None:
            self._kept = {}
            self._kept = self._saved.kept(source)
        precision = self._precision(source.tensor(loss_scale.NAME) if self._scaled else None)
        self._trained = self._saved.trained(source, self._trained, precision)
        if self._jumps is not None:
            self._jumps.load(source)

    def memory(self) -> MemoryReading:
        return self._memory.reading()

    def memories(self) -> tuple[MemoryReading, ...]:
        return self._memory.readings()

    def reset_peak(self) -> None:
        self._memory.reset_peak()

    def synchronize(self) -> None:
        jax.block_until_ready((self._trained, self._gradients))

    def profile(self, folder: Path) -> Recording:
        return Recording(folder)

    @property
    def _evaluated(self) -> dict[str, jax.Array]:
        """The weights to evaluate: their average if there is one."""
        averages: dict[str, jax.Array] | None = self._trained.average
        return averages or self._trained.weights

    @property
    def _scaled(self) -> bool:
        return loss_scale.is_scaled(self._plan.optimize.precision)

    def _precision(self, stored: Any) -> Any:
        """`TrainState.precision` at the current step: new, or as it was `stored`."""
        if self._scaled:
            state = loss_scale.start() if stored is None else stored
            return self._put(np.array(state, np.float32))
        rounds = self._plan.optimize.precision == "bf16-sr"
        return self._put(np.uint32(self._step)) if rounds else None

    def _arrays(self, arrays: Mapping[str, Array], *axes: int) -> dict[str, jax.Array]:
        """Put a batch on the device, with leading axes padded to `axes`, so that shapes never
        change."""
        found = {}
        for described in self._programs.inputs:
            array = arrays[described.name]
            filled = mapped.empty((*axes, *described.shape), described.dtype)
            if described.fill:
                filled.fill(described.fill)
            filled[tuple(slice(n) for n in array.shape[: len(axes)])] = array
            place = self._programs.places.rows(axes, len(axes) - 1)
            found[described.name] = put(filled, place)
        return found

    def _trained_arrays(self, batch: Batch) -> dict[str, jax.Array]:
        """The arrays of a training step."""
        found = self._arrays(batch.arrays, *self._programs.batch_axes)
        if drops(self._plan):
            found[dropout.BITS] = self._put(dropout.bits_of(self._plan, self._step))
        return found

    def _put(self, array: Any) -> jax.Array:
        return put(array, self._programs.sharding)
