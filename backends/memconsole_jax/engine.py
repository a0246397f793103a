"""The JAX engine: one jitted, donating training step over stacked arrays."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole_jax import devices, generate
from memconsole_jax.models.decoder import assemble
from memconsole_jax.profiling import Recording
from memconsole_jax.programs import Programs
from memconsole_jax.stacking import Stack, stacks
from memconsole_jax.step import TrainState, mean_gradients, summed_loss
from memconsole_jax.techniques import quantized_base
from memconsole_jax.techniques.average import first
from memconsole_jax.techniques.fused_loss import MASKED
from memconsole_trainer.engine import (
    PROMPT_TOKENS,
    STEP,
    Batch,
    DeviceFacts,
    LossSum,
    MemoryReading,
    StateSource,
    StepMetrics,
    WeightsError,
    WeightSource,
    check_names,
    micro_batches,
)
from memconsole_trainer.host.host_memory import HostMemory
from memconsole_trainer.loop.schedule import learning_rate
from memconsole_trainer.techniques import adapters, average, loss_scale
from memconsole_trainer.techniques.adapters import InitialAdapters

STEPS_IN_FLIGHT = 2
"""Steps the host may run ahead of the device; more would only queue batches."""


def create(plan: Plan, run_directory: Path | None) -> JaxEngine:
    """The engine for `plan` on this machine. Raises `PlanError`."""
    devices.prepare(plan)
    devices.keep_compilations()
    return JaxEngine(plan, devices.find(plan), run_directory)


class JaxEngine:
    """Implements `memconsole_trainer.engine.Engine`."""

    def __init__(self, plan: Plan, device: Any, run_directory: Path | None = None) -> None:
        self._plan = plan
        self._run_directory = run_directory
        self._device = device
        jax.config.update("jax_default_device", device)
        self.device: DeviceFacts = devices.facts(device)
        self.versions: Mapping[str, str] = {
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "flax": flax.__version__,
            "optax": optax.__version__,
        }
        self.parameters = 0
        self.trainable_parameters = 0
        self._host = HostMemory() if self.device.kind == "cpu" else None
        self._step = 0
        self._unread: list[tuple[int, float, jax.Array]] = []
        self._in_flight: deque[jax.Array] = deque()

    def platform_lines(self) -> list[str]:
        return devices.platform_lines(self._plan, self.device)

    def build(
        self, plan: Plan, architecture: Architecture, total_steps: int, weights: WeightSource
    ) -> None:
        """Compiles from shapes alone before anything is allocated: the compiler's own memory is then
        neither counted nor held beside the model's."""
        self._plan, self._architecture, self._total_steps = plan, architecture, total_steps
        self._programs = Programs.of(
            plan, architecture, self.device.kind, self._device, self._run_directory
        )
        self._trained_stacks, self._kept_stacks = self._programs.trained, self._programs.kept
        self._stacks = self._trained_stacks | self._kept_stacks
        members = {n: sum(p.size for p in s.members) for n, s in self._stacks.items()}
        self.parameters = sum(members.values())
        self.trainable_parameters = sum(members[n] for n in self._trained_stacks)
        self._compile()
        if self._host is not None:
            self._host.start()
        self._base: NDArray[np.uint8] | None = None
        if plan.optimize.lora_rank:
            base = adapters.Fingerprinted(weights)
            self._kept = self._load_base(base.tensor)
            self._base = base.fingerprint()
            weights = InitialAdapters(plan, architecture)
        else:
            self._kept = self._load(self._kept_stacks, weights.tensor)
        trained = self._load(self._trained_stacks, weights.tensor)
        averages = first(trained) if average.is_averaged(plan) else None
        state = self._initialize(trained)
        self._trained = TrainState(trained, state, self._precision(None), averages)

    def _compile(self) -> None:
        self._initialize = self._programs.lower_initialize().compile()
        self._train_step = self._programs.lower_train().compile()
        self._evaluation_step = self._programs.lower_evaluate().compile()
        wanted, room = self._plan.train.sample_tokens, self._architecture.max_positions
        self._samplers: dict[int, Any] = {}
        """By positions reserved: that of a training run's samples from the start."""
        if wanted and room > PROMPT_TOKENS + 1:
            tokens = min(wanted, room - PROMPT_TOKENS - 1)
            self._sampler(generate.cache_length(PROMPT_TOKENS, tokens))
        gc.collect()  # what tracing and compiling left: 13 MiB

    def _sampler(self, positions: int) -> Any:
        if positions not in self._samplers:
            self._samplers[positions] = self._programs.lower_sample(positions).compile()
        return self._samplers[positions]

    def train_step(self, batch: Batch) -> None:
        plan = self._plan
        rows = (plan.optimize.accumulation_steps, plan.train.batch_size)
        inputs, targets = _filled(batch.inputs, 0, rows), _filled(batch.targets, MASKED, rows)
        rate = learning_rate(self._step, plan, self._total_steps)
        arguments = (
            self._trained,
            self._kept,
            self._put(inputs),
            self._put(targets),
            self._put(np.array([rate, average.share(plan, self._step)], np.float32)),
            self._documents(batch.documents, rows),
        )
        self._trained, metrics = self._programs.disk.ran(self._train_step, *arguments)
        self._unread.append((self._step, rate, metrics))
        self._step += 1
        self._in_flight.append(metrics)
        if len(self._in_flight) > STEPS_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()

    def take_metrics(self) -> list[StepMetrics]:
        unread, self._unread = self._unread, []
        values = jax.device_get([metrics for _, _, metrics in unread])
        return [
            StepMetrics(step + 1, float(loss), float(norm), rate, *map(float, scale))
            for (step, rate, _), (loss, norm, *scale) in zip(unread, values, strict=True)
        ]

    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        rows = self._plan.evaluation_batch
        sums, tokens = self._put(np.zeros(2, np.float32)), 0
        for batch in batches:
            tokens += int((batch.targets != MASKED).sum())
            for inputs, targets, documents in micro_batches(batch):
                sums = self._evaluation_step(
                    sums,
                    self._evaluated,
                    self._kept,
                    self._put(_filled(inputs, 0, (rows,))),
                    self._put(_filled(targets, MASKED, (rows,))),
                    self._documents(documents, (rows,)),
                )
        total, lost = np.asarray(sums, np.float64)
        return LossSum(float(total - lost), tokens)

    def generate(
        self, prompt: list[int], tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        a = self._architecture
        if a.positions == "learned":
            if tokens >= a.max_positions:
                raise ValueError(f"{tokens} tokens, but the model has {a.max_positions} positions")
            prompt = prompt[-(a.max_positions - tokens) :]
        prompt = prompt or [0]
        length = len(prompt) + tokens
        row = np.zeros(generate.cache_length(len(prompt), tokens), np.int32)
        row[: len(prompt)] = prompt
        filled = self._sampler(len(row))(
            {**self._evaluated, **self._kept},
            self._put(row),
            self._put(np.int32(len(prompt))),
            self._put(np.int32(length)),
            self._put(np.float32(temperature)),
            self._put(np.int32(top_k)),
            self._put(np.uint32(seed % 2**32)),
        )
        return [int(token) for token in np.asarray(filled)[len(prompt) : length]]

    def state(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        yield STEP, np.array(self._step, np.int64)
        if self._base is not None:
            yield adapters.FINGERPRINT, self._base
        for name, stack in self._stacks.items():
            if self._base is not None and name in self._kept:
                continue
            weights = self._kept if name in self._kept else self._trained.weights
            rounded = self._programs.is_rounded(name)
            for canonical, row in stack.split(_host(weights[name])):
                yield f"model.{canonical}", row.astype(jnp.bfloat16) if rounded else row
        for name, array in (self._trained.average or {}).items():
            for canonical, row in self._stacks[name].split(_host(array)):
                yield f"{average.PREFIX}{canonical}", row
        if self._scaled:
            yield loss_scale.NAME, _host(self._trained.precision)
        for leaf in self._optimizer_leaves():
            for name, row in leaf.split(_host(leaf.array)):
                yield name, _as_stored(row)

    def load_state(self, source: StateSource) -> None:
        self.synchronize()
        check_names(source, self._state_names())
        if self._base is not None:
            adapters.check_base(self._base, source.tensor(adapters.FINGERPRINT))
        self._step = int(source.tensor(STEP))
        self._unread.clear()
        self._in_flight.clear()
        self._trained = TrainState({}, self._trained.optimizer)  # free before loading
        after = self._precision(source.tensor(loss_scale.NAME) if self._scaled else None)

        def stored(name: str) -> NDArray[np.generic]:
            return source.tensor(f"model.{name}")

        if self._base is None:
            self._kept = {}
            self._kept = self._load(self._kept_stacks, stored)
        weights = self._load(self._trained_stacks, stored)
        averages = None
        if average.is_averaged(self._plan):
            averages = self._load_average(source)
        loaded = []
        for leaf in self._optimizer_leaves():
            array, place = np.empty(leaf.array.shape, leaf.array.dtype), leaf.array.sharding
            leaf.array.delete()
            for name, row in leaf.split(array):
                found = source.tensor(name)
                if found.shape != row.shape:
                    raise WeightsError(f"{name}: shape {found.shape}, expected {row.shape}")
                _as_stored(row)[...] = found
            loaded.append(jax.device_put(array, place))
        structure = jax.tree.structure(self._trained.optimizer)
        self._trained = TrainState(weights, jax.tree.unflatten(structure, loaded), after, averages)

    def _state_names(self) -> Iterator[str]:
        """The names that `state` gives."""
        yield STEP
        if self._base is not None:
            yield adapters.FINGERPRINT
        for name, stack in self._stacks.items():
            if self._base is None or name not in self._kept:
                yield from (f"model.{p.name}" for p in stack.members)
        for name in self._trained.average or {}:
            yield from (f"{average.PREFIX}{p.name}" for p in self._stacks[name].members)
        if self._scaled:
            yield loss_scale.NAME
        for leaf in self._optimizer_leaves():
            if leaf.stack is None:
                yield leaf.prefix
            else:
                yield from (f"{leaf.prefix}.{p.name}" for p in leaf.stack.members)

    def memory(self) -> MemoryReading:
        if self._host is not None:
            now, peak = self._host.growth_bytes(), self._host.peak_bytes()
            return MemoryReading(now, peak, now, now, self.device.total_bytes)
        stats = self._device.memory_stats() or {}
        return MemoryReading(
            stats.get("bytes_in_use"),
            stats.get("peak_bytes_in_use"),
            stats.get("pool_bytes", stats.get("bytes_reserved")),
            None,
            stats.get("bytes_limit"),
            stats.get("peak_pool_bytes"),
        )

    def reset_peak(self) -> None:
        """On a CPU only: XLA's allocators keep the peak of the process."""
        if self._host is not None:
            self._host.reset_peak()

    def synchronize(self) -> None:
        jax.block_until_ready(self._trained)

    def profile(self, folder: Path) -> Recording:
        return Recording(folder)

    def compiled_memory(self) -> dict[str, int] | None:
        """The compiler's own account of the training step in bytes: argument, output, alias
        (arguments reused as outputs), temporary and program. None where it gives none."""
        analysis = self._train_step.memory_analysis()
        if analysis is None:
            return None
        return {
            "argument_bytes": analysis.argument_size_in_bytes,
            "output_bytes": analysis.output_size_in_bytes,
            "alias_bytes": analysis.alias_size_in_bytes,
            "temporary_bytes": analysis.temp_size_in_bytes,
            "program_bytes": analysis.generated_code_size_in_bytes,
        }

    def _load(self, found: Mapping[str, Stack], tensor: Any) -> dict[str, jax.Array]:
        """The arrays of `found`, one on the host at a time."""
        return {
            name: self._put(self._stored(name, stack.gather(tensor)))
            for name, stack in found.items()
        }

    def _load_average(self, source: StateSource) -> dict[str, jax.Array]:
        def stored(name: str) -> NDArray[np.generic]:
            return source.tensor(f"{average.PREFIX}{name}")

        found = self._trained_stacks.items()
        return {name: self._put(stack.gather(stored)) for name, stack in found}

    def _load_base(self, tensor: Any) -> dict[str, jax.Array]:
        """The arrays of the frozen base, some of them codes."""
        storage = self._plan.optimize.base_storage
        found: dict[str, jax.Array] = {}
        for name, stack in self._kept_stacks.items():
            if self._programs.is_quantized(name):
                arrays = quantized_base.gathered(stack, storage, tensor)
                found |= {n: self._put(array) for n, array in arrays.items()}
            else:
                found |= self._load({name: stack}, tensor)
        return found

    def _stored(self, name: str, array: NDArray[np.float32]) -> Any:
        """`array` as it is kept: a frozen base that is computed with in 16 bits is rounded to them."""
        if not self._programs.is_rounded(name):
            return array
        if self._programs.dtype(name) == jnp.float32:
            return adapters.narrow_rounded(self._plan, array)
        return adapters.narrow_rounded(self._plan, array).astype(self._programs.dtype(name))

    @property
    def _evaluated(self) -> dict[str, jax.Array]:
        """The weights to evaluate: their average where there is one."""
        averages: dict[str, jax.Array] | None = self._trained.average
        return averages or self._trained.weights

    @property
    def _scaled(self) -> bool:
        return loss_scale.is_scaled(self._plan.optimize.precision)

    def _precision(self, stored: Any) -> Any:
        """The third part of `TrainState`, anew or as it was `stored`, at the present step."""
        if self._scaled:
            state = loss_scale.start() if stored is None else stored
            return self._put(np.array(state, np.float32))
        rounds = self._plan.optimize.precision == "bf16-sr"
        return self._put(np.uint32(self._step)) if rounds else None

    def _documents(self, documents: Any, rows: tuple[int, ...]) -> jax.Array | None:
        return None if documents is None else self._put(_filled(documents, 0, rows))

    def _put(self, array: Any) -> jax.Array:
        return jax.device_put(array, self._device)

    def _optimizer_leaves(self) -> list[OptimizerLeaf]:
        """Every array of the optimizer state, in the order `jax.tree` has them."""
        found = []
        for path, array in jax.tree_util.tree_flatten_with_path(self._trained.optimizer)[0]:
            words = [_word(key) for key in path]
            own = next((self._stacks[w] for w in words[-2:] if w in self._stacks), None)
            if own is None:
                found.append(OptimizerLeaf(".".join(["optimizer", *words]), None, array))
                continue
            before = words.index(own.name)
            layer = words[before + 1 :]  # of a state that waits on the host
            stack = own.layer(int(layer[0])) if layer else own
            found.append(OptimizerLeaf(".".join(["optimizer", *words[:before]]), stack, array))
        return found


def _as_stored(row: NDArray[Any]) -> NDArray[Any]:
    """A part of the optimizer's state as checkpoints have it: bits that are kept in uint16 are bfloat16's."""
    return row.view(jnp.bfloat16) if row.dtype == np.uint16 else row


@dataclass(frozen=True)
class OptimizerLeaf:
    """One array of the optimizer state: of one weight's stack, or a scalar of its own."""

    prefix: str
    stack: Stack | None
    array: jax.Array

    def split(self, array: NDArray[np.generic]) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Checkpoint names and the parts of `array`, views."""
        if self.stack is None:
            yield self.prefix, array
        else:
            for canonical, row in self.stack.split(array):
                yield f"{self.prefix}.{canonical}", row


def logits(
    architecture: Architecture,
    weights: WeightSource,
    tokens: NDArray[np.integer],
    documents: NDArray[np.integer] | None = None,
) -> NDArray[np.float32]:
    """Float32 logits (B, T, V) of tokens (B, T)."""
    arrays = {n: jnp.asarray(s.gather(weights.tensor)) for n, s in stacks(architecture).items()}
    run = jax.jit(lambda w, *rows: assemble(architecture, w)(rows[0], documents=rows[1]))
    own = None if documents is None else jnp.asarray(documents, jnp.int32)
    return np.array(run(arrays, jnp.asarray(tokens, jnp.int32), own))


def gradients(
    architecture: Architecture, weights: WeightSource, batch: Batch
) -> dict[str, NDArray[np.generic]]:
    """Gradients of the mean loss over the batch's unmasked targets in float32, by canonical name."""
    found = stacks(architecture)
    arrays = {n: jnp.asarray(s.gather(weights.tensor)) for n, s in found.items()}
    trained = {n: x for n, x in arrays.items() if found[n].used}
    kept = {n: x for n, x in arrays.items() if not found[n].used}

    loss = summed_loss(Plan(), architecture, chunked=False)
    run = jax.jit(lambda *arguments: mean_gradients(loss, *arguments)[1])
    own = None if batch.documents is None else jnp.asarray(batch.documents)
    rows = jnp.asarray(batch.inputs), jnp.asarray(batch.targets)
    result = run(trained, kept, *rows, 1.0, own)
    return {c: row for n, x in result.items() for c, row in found[n].split(np.array(x))}


def _filled(array: NDArray[np.int32], value: int, rows: tuple[int, ...]) -> NDArray[np.int32]:
    """A copy of `array` with its leading axes filled up to `rows`, so that no shape is ever new."""
    filled = np.full((*rows, array.shape[-1]), value, np.int32)
    filled[tuple(slice(n) for n in array.shape[:-1])] = array
    return filled


def _host(array: jax.Array) -> NDArray[np.generic]:
    """`array` on the host: on a CPU a view, which must be gone before the next step, because a buffer that is
    looked at cannot be donated; elsewhere a copy, which JAX does not keep with the array."""
    on_cpu = all(device.platform == "cpu" for device in array.devices())
    if on_cpu and array.dtype != jnp.bfloat16:  # NumPy's DLPack has no bfloat16
        return np.from_dlpack(array)
    return np.array(array)


def _word(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))
