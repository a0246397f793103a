"""The torch engine: one model trained on one device behind the trainer's protocol."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memconsole.plan.architecture import Architecture, parameters
from memconsole.plan.plan import Plan, PlanError
from memconsole_torch import devices
from memconsole_torch.models import pretrained
from memconsole_torch.models.generate import generate
from memconsole_torch.profiling import Recording
from memconsole_torch.techniques import (
    activation_offload,
    checkpointing,
    compilation,
    fused_loss,
    lora,
    optimizers,
    precision,
    rounding,
)
from memconsole_torch.techniques.average import Average
from memconsole_torch.techniques.optimizer_in_backward import InBackward
from memconsole_trainer.engine import (
    STEP,
    Batch,
    DeviceFacts,
    Int32,
    LossSum,
    MemoryReading,
    StateSource,
    StepMetrics,
    WeightSource,
    check_names,
    micro_batches,
)
from memconsole_trainer.host.platform_lines import optimization_lines
from memconsole_trainer.loop.schedule import learning_rate
from memconsole_trainer.techniques import adapters, average, loss_scale


def create(plan: Plan, run_directory: Path | None) -> TorchEngine:
    """An engine for `plan` on this machine. Raises `PlanError` for what cannot run here."""
    # Optimizers import it on first use; here, what it holds is not taken for the model's memory.

    device = devices.resolve(plan.device)
    if plan.optimize.compile:
        compilation.check(device)
    devices.prepare(device, plan)
    return TorchEngine(plan, device, run_directory)


class TorchEngine:
    """A decoder, its optimizer and the step count, on one device."""

    device: DeviceFacts
    versions: Mapping[str, str]
    parameters: int = 0
    trainable_parameters: int = 0

    def __init__(self, plan: Plan, device: torch.device, run_directory: Path | None = None) -> None:
        self._plan = plan
        self._run_directory = run_directory
        self._device = device
        self._memory = devices.DeviceMemory(device)
        self._metrics: list[tuple[int, float, Tensor]] = []
        self._step = 0
        self.device = devices.facts(device)
        self.versions = {"python": platform.python_version(), "torch": torch.__version__}

    def platform_lines(self) -> list[str]:
        o = self._plan.optimize
        compiled = ["torch.compile enabled - the first steps compile"] if o.compile else []
        return [
            devices.line(self._device, self.device),
            precision.line(self._device, o.precision),
            *optimization_lines(self._plan, self.device.kind),
            *compiled,
        ]

    def build(
        self, plan: Plan, architecture: Architecture, total_steps: int, weights: WeightSource
    ) -> None:
        """Allocate the model and the optimizer and load `weights`.

        Raises `PlanError` where the sequence is longer than the learned positions.
        """
        length = plan.data.sequence_length
        if architecture.positions == "learned" and length > architecture.max_positions:
            raise PlanError(
                f"data.sequence_length = {length}: the model has {architecture.max_positions} positions",
                "data.sequence_length",
            )
        self._memory.start()
        self._plan, self._total_steps = plan, total_steps
        self._base: NDArray[np.uint8] | None = None
        if plan.optimize.lora_rank:
            base = adapters.Fingerprinted(weights)
            self._decoder = lora.load(plan, architecture, base, self._device)
            self._base = base.fingerprint()
        else:
            narrow = partial(rounding.narrow, plan)
            self._decoder = pretrained.load(architecture, weights, self._device, narrow)
        self._trained = [p for p in self._decoder.parameters() if p.requires_grad]
        self._optimizer = optimizers.create(plan, self._decoder)
        if plan.optimize.precision == "bf16-sr":
            self._optimizer = rounding.Rounded(plan, self._decoder, self._optimizer)
        self._scale: precision.LossScale | None = None
        if loss_scale.is_scaled(plan.optimize.precision):
            self._scale = precision.LossScale(self._device)
        self._average: Average | None = None
        if average.is_averaged(plan):
            trained = adapters.trained_parameters(plan, architecture)
            self._average = Average(self._decoder, [p.name for p in trained])
        self._in_backward: InBackward | None = None
        if plan.optimize.optimizer_in_backward:
            assert isinstance(self._optimizer, optimizers.CombinedOptimizer)
            self._in_backward = InBackward(self._optimizer)
        self._loss = fused_loss.chunked if plan.optimize.fused_loss else fused_loss.whole
        o = plan.optimize
        checkpointing.apply(self._decoder, o.gradient_checkpointing, o.lora_rank)
        if plan.optimize.activation_offload:
            activation_offload.apply(self._decoder, self._run_directory)
        if plan.optimize.compile:
            compilation.apply(self._decoder)
        rank = plan.optimize.lora_rank
        whole = (*parameters(architecture), *adapters.adapters(architecture, rank))
        self.parameters = sum(p.size for p in whole)
        self.trainable_parameters = sum(p.numel() for p in self._trained)

    def train_step(self, batch: Batch) -> None:
        """One optimizer step. Does not wait for the device.

        Every micro-batch's summed nats are divided by the unmasked targets of the whole batch, so
        that ragged and masked micro-batches weigh by their tokens.
        """
        rate = learning_rate(self._step, self._plan, self._total_steps)
        optimizers.set_learning_rate(self._optimizer, rate)
        if isinstance(self._optimizer, rounding.Rounded):
            self._optimizer.number = self._step
        scale = 1.0 if self._scale is None else self._scale.now
        share = scale / max(1, int((batch.targets != fused_loss.IGNORE).sum()))
        loss = torch.zeros((), device=self._device)
        for inputs, targets, documents in micro_batches(batch):
            with precision.forward_context(self._device, self._plan.optimize.precision):
                hidden = self._hidden(inputs, documents)
                head, labels = self._decoder.head_weight, self._to_device(targets)
                part = self._loss(hidden, head, labels, share=share)
                del hidden, labels
            part.backward()
            loss += part.detach()
            self._memory.observe()
            del part
        norm = self._updated() if self._in_backward is None else self._in_backward.take_norm()
        if self._average is not None:
            live = None if self._scale is None else torch.isfinite(norm).float()
            self._average.follow(average.share(self._plan, self._step), live)
        self._step += 1
        scaled = [] if self._scale is None else [scale]
        self._metrics.append((self._step, rate, torch.stack([loss / scale, norm, *scaled])))

    def _updated(self) -> Tensor:
        """Clip the gradients, step and let go of them. Returns their norm before, a device scalar."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        most = self._plan.train.grad_clip
        if self._scale is not None:
            norm = self._scale.take(self._optimizer, gradients, most)
        elif isinstance(self._optimizer, rounding.Rounded):
            norm = self._optimizer.take(gradients, most)
        else:
            norm = optimizers.clip(gradients, most)
            self._optimizer.step()
        del gradients
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def take_metrics(self) -> list[StepMetrics]:
        """Every step since the last call, read from the device in one transfer."""
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
        """Summed loss over `batches` without gradients; one read-back at the end.

        The head always runs in chunks: no full logits, whatever training does.
        """
        sums: list[Tensor] = []
        tokens = 0
        with self._evaluated():
            for batch in batches:
                tokens += int((batch.targets != fused_loss.IGNORE).sum())
                for inputs, targets, documents in micro_batches(batch):
                    with precision.forward_context(self._device, self._plan.optimize.precision):
                        hidden = self._hidden(inputs, documents)
                        head = self._decoder.head_weight
                        sums.append(fused_loss.chunked(hidden, head, self._to_device(targets)))
        nats = sum(torch.stack(sums).tolist()) if sums else 0.0
        return LossSum(float(nats), tokens)

    def generate(
        self, prompt: list[int], tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        """`tokens` sampled continuations of `prompt`; the model sees at most a training row."""
        with (
            self._evaluated(),
            compilation.paused(),
            precision.forward_context(self._device, self._plan.optimize.precision),
        ):
            return generate(
                self._decoder,
                prompt,
                tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                context=self._plan.data.sequence_length,
            )

    def state(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Every tensor needed to continue exactly, one at a time; of an adapted model not the base.

        On a CPU the arrays are the live tensors: write or copy them before the next step. There is
        no random state: nothing random happens in a step.
        """
        self.synchronize()  # state that waits in host memory may still be on its way
        for name, tensor in self._named_state():
            yield name, pretrained.on_host(tensor)
        if self._base is not None:
            yield adapters.FINGERPRINT, self._base
        yield STEP, np.asarray(self._step, dtype=np.int64)

    def load_state(self, source: StateSource) -> None:
        """Continue from `state()`; one tensor passes through at a time."""
        self.synchronize()
        mine = dict(self._named_state())
        base = () if self._base is None else (adapters.FINGERPRINT,)
        check_names(source, (*mine, STEP, *base))
        if self._base is not None:
            adapters.check_base(self._base, source.tensor(adapters.FINGERPRINT))
        for name, tensor in mine.items():
            pretrained.copy_into(tensor, source.tensor(name), name)
        self._step = int(source.tensor(STEP))
        skipped = 0 if self._scale is None else self._scale.skipped()
        optimizers.set_step(self._optimizer, self._step - skipped)
        self._metrics.clear()

    def memory(self) -> MemoryReading:
        return self._memory.reading()

    def reset_peak(self) -> None:
        self._memory.reset_peak()

    def synchronize(self) -> None:
        devices.synchronize(self._device)

    def profile(self, folder: Path) -> Recording:
        return Recording(folder, self._device)

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._decoder.named_parameters():
            if self._base is None or tensor.requires_grad:
                yield f"model.{name}", tensor
        for name, tensor in self._average.named() if self._average is not None else ():
            yield f"{average.PREFIX}{name}", tensor
        for name, tensor in optimizers.slots(self._optimizer, self._decoder):
            yield f"optimizer.{name}", tensor
        if self._scale is not None:
            yield loss_scale.NAME, self._scale.state

    def _evaluated(self) -> AbstractContextManager[None]:
        """The decoder has the weights to evaluate: their average where there is one."""
        return nullcontext() if self._average is None else self._average.shown()

    def _hidden(self, inputs: Int32, documents: Int32 | None) -> Tensor:
        """Final hidden states of one micro-batch."""
        if documents is None:
            return self._decoder(self._to_device(inputs))
        return self._decoder(self._to_device(inputs), self._to_device(documents))

    def _to_device(self, array: Int32) -> Tensor:
        """`array` on the device; from pinned memory on CUDA, so that the copy is asynchronous."""
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)


def logits(
    architecture: Architecture,
    weights: WeightSource,
    tokens: Int32,
    documents: Int32 | None = None,
) -> NDArray[np.float32]:
    """fp32 logits (B, T, V) of `tokens` (B, T) on the CPU, for comparing backends."""
    decoder = pretrained.load(architecture, weights, torch.device("cpu"))
    own = None if documents is None else torch.from_numpy(documents)
    with torch.no_grad():
        result: Any = decoder.logits(torch.from_numpy(tokens), own).numpy()
    return np.asarray(result, dtype=np.float32)


def gradients(
    architecture: Architecture, weights: WeightSource, batch: Batch
) -> dict[str, NDArray[np.float32]]:
    """fp32 gradients of the mean nats per unmasked target, by canonical name, on the CPU.

    For comparing backends. Parameters no term of the loss reaches are left out.
    """
    decoder = pretrained.load(architecture, weights, torch.device("cpu"))
    total = int((batch.targets != fused_loss.IGNORE).sum())
    for inputs, targets, documents in micro_batches(batch):
        own = None if documents is None else torch.from_numpy(documents)
        hidden = decoder(torch.from_numpy(inputs), own)
        nats = fused_loss.whole(hidden, decoder.head_weight, torch.from_numpy(targets))
        (nats / total).backward()
    own = dict(decoder.named_parameters())
    used = (p for p in parameters(architecture) if p.used)
    return {p.name: own[p.name].grad.numpy() for p in used}
