"""The torch engine: it implements the trainer's engine protocol for one model on one device."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.plan import Plan, Precision
from memconsole.plan.training.compiler import imports_compiler
from memconsole.plan.training.trained import frozen_names
from memconsole_torch import devices, tasks
from memconsole_torch.jumps import TorchJumps
from memconsole_torch.kernels import launch
from memconsole_torch.models import decoder, experts, pretrained
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.models.generate import generate
from memconsole_torch.process_group import TorchProcessGroup, join, local_rank
from memconsole_torch.profiling import Recording
from memconsole_torch.releasing import Releaser
from memconsole_torch.saved import loading
from memconsole_torch.saved.tensors import Saved
from memconsole_torch.tasks.task import MicroBatch
from memconsole_torch.techniques import compilation, sharding
from memconsole_torch.techniques.activations import (
    activation_offload,
    checkpointing,
    dropout,
    tiled_mlp,
)
from memconsole_torch.techniques.optimizer import offload, optimizers
from memconsole_torch.techniques.optimizer_in_backward import InBackward
from memconsole_torch.techniques.weights import precision, rounding
from memconsole_torch.techniques.weights.average import Average
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
from memconsole_trainer.host.platform_lines import optimization_lines
from memconsole_trainer.jumps import UPDATES, group_of, phase_precision, saved_snapshots
from memconsole_trainer.process_group import SingleProcess, local_rows
from memconsole_trainer.schedule import learning_rate, summed_batches
from memconsole_trainer.techniques import adapters, average, loss_scale


def create(plan: Plan, run_directory: Path | None) -> TorchEngine:
    """An engine for `plan` on this machine. Raises `PlanError` if the plan cannot run here."""
    device = devices.resolve(plan.device, local_rank())
    if imports_compiler(plan) or not optimizers.has_fused(device):
        import torch._dynamo  # noqa: F401 (imported here, its memory is not counted as the model's)
    if plan.optimize.compile:
        compilation.check(device)
    devices.prepare(device, plan)
    if device.type == "cuda":
        decoder.flash_on_cuda = devices.has_flash(device)
    return TorchEngine(plan, device, run_directory, join(plan.device.count, device))


class TorchEngine:
    """A model, its optimizer and the step count, on one device; or this process's part of them."""

    device: DeviceFacts
    versions: Mapping[str, str]
    parameters: int = 0
    trainable_parameters: int = 0

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        run_directory: Path | None = None,
        process_group: TorchProcessGroup | SingleProcess | None = None,
    ) -> None:
        self._plan = plan
        self.process_group = process_group or SingleProcess()
        self._run_directory = run_directory
        self._device = device
        self._memory = devices.DeviceMemory(device)
        self._metrics: list[tuple[int, float, Tensor]] = []
        """Step, learning rate, and on the device loss, gradient norm and loss scale (if any), of unread steps."""
        self._pending: tuple[float, Tensor, Tensor | float] | None = None
        """Learning rate, loss and loss scale of the gradients that wait for an update."""
        self._step = 0
        self._updates = 0
        """Updates since the optimizer began; with fp16, also those that were skipped."""
        self.device = devices.facts(device)
        self.versions = {"python": platform.python_version(), "torch": torch.__version__}

    def platform_lines(self) -> list[str]:
        o = self._plan.optimize
        compiled = ["torch.compile enabled - the first steps compile"] if o.compile else []
        return [
            devices.platform_line(self.device),
            precision.line(self._device, o.precision),
            *optimization_lines(self._plan, self.device.kind),
            *compiled,
            *launch.lines(self._device),
        ]

    def prepare(self, plan: Plan, model: Model) -> None:
        """There is nothing to compile."""

    def build(self, plan: Plan, model: Model, total_steps: int, weights: WeightSource) -> None:
        """Allocate the model and the optimizer and load `weights`.

        Raises `PlanError` if rows are longer than the model's positions.
        """
        self.task = tasks.of(plan, model)
        self._memory.start()
        self._plan, self._total_steps = plan, total_steps
        source = adapters.Fingerprinted(weights, frozen_names(plan, model))
        self.module = loading.load(plan, model, self.task, source, self._device, self._split)
        self._base = source.fingerprint()
        """The fingerprint of the frozen weights; None if no weight is frozen."""
        fsdp = plan.optimize.sharding == "fsdp" and self.process_group.size > 1
        self._rows = sharding.LocalRows(self.module) if fsdp else None
        trained = adapters.trained_parameters(plan, model)
        self._build_optimizer(plan, trained)
        self._apply_techniques(plan, model)
        self._replicated: sharding.Replicated | None = None
        if isinstance(self.process_group, TorchProcessGroup) and not fsdp:
            self._replicated = sharding.Replicated(self.module, self.process_group.exchanges)
        self.saved = Saved(
            self.module,
            self._rows,
            self._optimizer,
            self._average,
            self._scale,
            based=self._base is not None,
        )
        self._build_hybrid(plan, trained)
        every = (*model.parameters(), *adapters.adapters_of(self._plan, model))
        self.parameters = sum(p.size for p in every)
        self.trainable_parameters = sum(p.size for p in trained)

    def _build_optimizer(self, plan: Plan, trained: Sequence[Parameter]) -> None:
        """Allocate the optimizer of the `trained` weights, their moving average and the loss scale."""
        local: optimizers.Weights = self._rows or self.module
        self._trained = [p for p in local.parameters() if p.requires_grad]
        self._optimizer = optimizers.create(plan, local)
        if plan.optimize.precision == "bf16-sr":
            self._optimizer = rounding.Rounded(plan, self.module, self._optimizer)
        self._scale: precision.LossScale | None = None
        if loss_scale.is_scaled(plan.optimize.precision):
            self._scale = precision.LossScale(self._device, self._sum_over_processes)
        self._average: Average | None = None
        if average.is_averaged(plan):
            self._average = Average(local, [p.name for p in trained])
        self._in_backward: InBackward | None = None
        if plan.optimize.optimizer_in_backward:
            assert isinstance(self._optimizer, optimizers.CombinedOptimizer)
            self._in_backward = InBackward(self._optimizer)

    def _apply_techniques(self, plan: Plan, model: Model) -> None:
        """Change the module's forward pass as the plan asks."""
        o = plan.optimize
        self._draws = dropout.apply(plan, self.module)
        self._balance = experts.balance(plan, model, self.module.layers)
        if o.tiled_mlp and isinstance(model, Architecture) and not model.experts:
            tiled_mlp.apply(self.module, model)
        checkpointing.apply(self.module, o.gradient_checkpointing, o.lora_rank, compiled=o.compile)
        if o.activation_offload:
            activation_offload.apply(self.module, self._run_directory)
        if o.compile:
            compilation.apply(self.module)

    def _build_hybrid(self, plan: Plan, trained: Sequence[Parameter]) -> None:
        """Prepare to release parts of the engine and to change its precision; for a hybrid plan, also to jump."""
        moves = not offload.same_memory(self._device)
        self._releaser = Releaser(
            self._device, self.saved.of, moves=moves, signed=self.saved.is_signed
        )
        self._compute: Precision = plan.optimize.precision
        self._jumps: TorchJumps | None = None
        if plan.hybrid.on:
            compute = phase_precision(plan, "predict")
            groups = {p.name: group_of(p) for p in trained}
            self._jumps = TorchJumps(
                self.module, groups, self.task, self._to_device, compute, moves=moves
            )

    def train_step(self, batch: Batch) -> None:
        """One optimizer step. Does not wait for the device."""
        self.backward(batch)
        self.update()

    def backward(self, batch: Batch) -> None:
        """Compute the gradients of the batch's mean loss for `update`. Does not wait for the
        device.

        Every micro-batch's summed loss is divided by the weight of the whole batch, so
        micro-batches with padding or masks contribute in proportion to their weight. With the
        optimizer inside the backward pass, the weights are updated here.
        """
        inside = self._in_backward is not None
        self._releaser.require("weights", *(("optimizer",) if inside else ()))
        self._drop_gradients()
        rate = learning_rate(self._step, self._plan, self._total_steps)
        optimizers.set_learning_rate(self._optimizer, rate)
        if isinstance(self._optimizer, rounding.Rounded):
            self._optimizer.number = self._step
        scale = 1.0 if self._scale is None else self._scale.now
        sums = summed_batches(self._plan)
        share = sums * scale / max(1.0, batch.weight)  # each micro-batch's loss is multiplied by it
        if self._balance is not None:
            # Gradients are summed over the processes, or averaged by DistributedDataParallel.
            summed = 1 if self._replicated is not None else self.process_group.size
            parts = self._plan.optimize.accumulation_steps * summed
            self._balance.scale = sums * scale / parts
        loss = torch.zeros((), device=self._device)
        last = self._plan.optimize.accumulation_steps - 1
        for index, arrays in enumerate(batch.micro_batches()):
            rows = MicroBatch(local_rows(self.process_group, arrays), self._to_device)
            dropping = nullcontext() if self._draws is None else self._draws.of(self._step, index)
            with dropping, self._exchanging(index == last):
                with precision.forward_context(self._device, self._compute):
                    part = self.task.loss(self._replicated or self.module, rows, share)
                self._memory.observe()
                sharding.backward(part, self._replicated)
            loss += part.detach()
            self._memory.observe()
            del part
        if isinstance(self.process_group, TorchProcessGroup):
            self.process_group.all_reduce_sum(loss)
        self._pending = rate, loss / sums, scale

    def update(self) -> None:
        """Update the weights with the gradients of the last `backward`, and free the gradients."""
        self._releaser.require("weights", "optimizer", "gradients")
        if self._pending is None:
            raise RuntimeError("there are no gradients to update with: call backward first")
        (rate, loss, scale), self._pending = self._pending, None
        norm = self._clip_and_step() if self._in_backward is None else self._in_backward.take_norm()
        if self._average is not None:
            # With fp16, a step whose gradients are not finite is skipped: the average must not move either.
            applied = None if self._scale is None else torch.isfinite(norm).float()
            self._average.follow(average.share(self._plan, self._step), applied)
        self._step += 1
        self._updates += 1
        scaled = [] if self._scale is None else [scale]
        self._metrics.append((self._step, rate, torch.stack([loss / scale, norm, *scaled])))

    def release(self, part: Part, mode: ReleaseMode = "cpu") -> None:
        """Free the device memory of `part` until `restore`."""
        self.synchronize()
        self._releaser.release(part, mode)
        if mode == "reinitialize":
            self._updates = 0
            optimizers.set_step(self._optimizer, 0)

    def fetch(self, part: Part) -> None:
        """Begin to bring a released `part` back to the device."""
        self._releaser.fetch(part)

    def restore(self, part: Part) -> None:
        """Bring a released `part` back to the device."""
        self._releaser.restore(part)

    @property
    def jumps(self) -> TorchJumps:
        """Snapshots and jumps. Raises `RuntimeError` if the plan predicts no weights."""
        if self._jumps is None:
            raise RuntimeError("the plan predicts no weights: hybrid.mode is off")
        return self._jumps

    def restart_average(self) -> None:
        """Set the average of the weights, if there is one, to the weights."""
        if self._average is not None:
            self._average.restart()

    def compute_in(self, compute: Precision) -> None:
        """Compute all further gradient steps in this precision."""
        self._compute = compute

    def count_step(self, loss: float) -> None:
        """Count a step that updated nothing, and report its mean `loss`."""
        rate = learning_rate(self._step, self._plan, self._total_steps)
        self._step += 1
        self._metrics.append(
            (self._step, rate, torch.tensor([loss, math.nan], device=self._device))
        )

    def _clip_and_step(self) -> Tensor:
        """Clip the gradients, step, and free them. Returns their norm before clipping, a device
        scalar."""
        if self._rows is not None:
            self._rows.take_gradients()
        gradients = [p.grad for p in self._trained if p.grad is not None]
        most = self._plan.train.grad_clip
        if self._scale is not None:
            norm = self._scale.take(self._optimizer, gradients, most)
        elif isinstance(self._optimizer, rounding.Rounded):
            norm = self._optimizer.take(gradients, most)
        else:
            norm = optimizers.clip(gradients, most, self._sum_over_processes)
            self._optimizer.step()
        del gradients
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def take_metrics(self) -> list[StepMetrics]:
        """Metrics of every step since the last call, read from the device in one transfer."""
        if not self._metrics:
            return []
        taken, self._metrics = self._metrics, []
        numbers = torch.stack([values for _, _, values in taken]).tolist()
        return [
            StepMetrics(step, values[0], values[1], rate, *values[2:])
            for (step, rate, _), values in zip(taken, numbers, strict=True)
        ]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        """Summed loss over `batches` without gradients, read from the device once at the end. On a CPU the
        sums are read after each batch: a tensor that stays allocated in the heap would fragment the memory
        that a batch frees for the next one."""
        self._releaser.require("weights")
        sums: list[Any] = []
        on_cpu = self._device.type == "cpu"
        weight = 0.0
        with self._evaluation_weights():
            for batch in batches:
                weight += batch.weight
                for arrays in batch.micro_batches():
                    rows = MicroBatch(local_rows(self.process_group, arrays), self._to_device)
                    with precision.forward_context(self._device, self._plan.optimize.precision):
                        loss_and_measures = self.task.sums(self.module, rows)
                    sums.append(loss_and_measures.tolist() if on_cpu else loss_and_measures)
        if not sums:
            return LossSum(0.0, weight)
        table = torch.tensor(sums) if on_cpu else torch.stack(sums)  # (micro-batches, 1 + measures)
        if isinstance(self.process_group, TorchProcessGroup):
            self.process_group.all_reduce_sum(table)
        loss, *measures = (sum(column) for column in zip(*table.tolist(), strict=True))
        return LossSum(loss, weight, tuple(measures))

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Array:
        """The outputs for a batch of one micro-batch. Several processes share its rows, if they can share them equally."""
        self._releaser.require("weights")
        (arrays,) = batch.micro_batches()
        rows = len(next(iter(arrays.values())))
        shared = (
            isinstance(self.process_group, TorchProcessGroup)
            and rows % self.process_group.size == 0
        )
        local = local_rows(self.process_group, arrays) if shared else arrays
        with (
            self._evaluation_weights(),
            compilation.paused(),
            precision.forward_context(self._device, self._plan.optimize.precision),
        ):
            outputs = self.task.outputs(self.module, MicroBatch(local, self._to_device)).float()
        if shared:
            assert isinstance(self.process_group, TorchProcessGroup)
            outputs = self.process_group.all_gather_rows(outputs)
        values: Array = outputs.cpu().numpy()
        return values

    def generate(
        self,
        prompt: list[int],
        tokens: int,
        sampling: Sampling = GREEDY,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        self._releaser.require("weights")
        if not isinstance(self.module, Decoder):
            raise ValueError("this model continues no text")
        with (
            self._evaluation_weights(),
            compilation.paused(),
            precision.forward_context(self._device, self._plan.optimize.precision),
        ):
            return generate(self.module, prompt, tokens, sampling, on_tokens)

    def state(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield every tensor needed to continue exactly, one at a time, without a frozen base.

        On a CPU the arrays share memory with the tensors: write or copy them before the next step. There is
        no state of a random generator: random numbers are computed from the plan's seed and the step.
        """
        self.synchronize()  # copies of offloaded state to the host may still be running
        for name, tensor in self.saved.named():
            yield name, pretrained.on_host(self.saved.whole(name, self._releaser.values(tensor)))
        if self._base is not None:
            yield adapters.FINGERPRINT, self._base
        if self._jumps is not None:
            yield UPDATES, np.asarray(self._updates, dtype=np.int64)
            yield from self._jumps.tensors()
        yield STEP, np.asarray(self._step, dtype=np.int64)

    def load_state(self, source: StateSource) -> None:
        """Continue from `state()`, loading one tensor at a time."""
        self.synchronize()
        self._drop_gradients()
        self.restore("weights")
        self.restore("optimizer")
        tensors = dict(self.saved.named())
        base = () if self._base is None else (adapters.FINGERPRINT,)
        hybrid = () if self._jumps is None else (UPDATES, *saved_snapshots(source).names)
        check_names(source, (*tensors, STEP, *base, *hybrid))
        if self._base is not None:
            adapters.check_base(self._base, source.tensor(adapters.FINGERPRINT))
        for name, tensor in tensors.items():
            pretrained.copy_into(tensor, self.saved.local_part(name, source.tensor(name)), name)
        self._step = int(source.tensor(STEP))
        self._updates = self._step if self._jumps is None else int(source.tensor(UPDATES))
        skipped = 0 if self._scale is None else self._scale.skipped()
        optimizers.set_step(self._optimizer, self._updates - skipped)
        if self._jumps is not None:
            self._jumps.load(source)
        self._metrics.clear()

    def memory(self) -> MemoryReading:
        return self._memory.reading()

    def memories(self) -> tuple[MemoryReading, ...]:
        return (self.memory(),)

    def reset_peak(self) -> None:
        self._memory.reset_peak()

    def synchronize(self) -> None:
        devices.synchronize(self._device)

    def profile(self, folder: Path) -> Recording:
        return Recording(folder, self._device)

    def _drop_gradients(self) -> None:
        self._pending = None
        self._releaser.discard("gradients")
        for p in self._trained:
            p.grad = None
        if self._rows is not None:
            self._rows.drop_gradients()
        if self._in_backward is not None:
            self._in_backward.drop_norms()

    @contextmanager
    def _evaluation_weights(self) -> Iterator[None]:
        """A context in which the module computes with the moving average of its weights, if there is one."""
        with nullcontext() if self._average is None else self._average.swapped_in():
            yield
            if self._rows is not None:
                self._rows.reshard()

    @property
    def _sum_over_processes(self) -> optimizers.ProcessSum | None:
        """A function that adds up a device scalar over all processes; None unless each process holds only
        some rows of the gradients."""
        if self._rows is None or not isinstance(self.process_group, TorchProcessGroup):
            return None
        return self.process_group.all_reduce_sum

    def _split(self, module: nn.Module) -> None:
        if self._plan.optimize.sharding == "fsdp" and isinstance(
            self.process_group, TorchProcessGroup
        ):
            sharding.split(
                self._plan, self.process_group.mesh, module, self.process_group.exchanges
            )

    def _exchanging(self, last: bool) -> AbstractContextManager[None]:
        """A context for a micro-batch: copies of the model add up gradients after the `last` one."""
        return nullcontext() if self._replicated is None or last else self._replicated.no_sync()

    def _to_device(self, array: Array) -> Tensor:
        """Copy `array` to the device; on CUDA from pinned memory, so that the copy is
        asynchronous."""
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)
