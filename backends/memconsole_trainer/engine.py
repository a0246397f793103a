"""The protocol between the training loop and a backend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.model import Model
from memconsole.plan.plan import Plan

Array = NDArray[np.generic]
STEP = "optimizer.step"
"""The tensor of a state that counts the steps taken."""


Part = Literal["weights", "optimizer", "gradients"]
"""What an engine can put away and bring back: all weights, frozen ones and averages among them; the optimizer's
state; the gradients that wait for an update."""


@dataclass(frozen=True)
class Batch:
    """The rows of one optimizer step, or of one evaluation call.

    `arrays` are those that the task names in `inputs`, each (micro_batches, micro_batch, ...). The summed loss over
    all of them divided by `weight` is the batch's loss; language counts a token that is not masked as 1.
    """

    arrays: Mapping[str, Array]
    weight: float

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def micro_batches(self) -> Iterator[dict[str, Array]]:
        """The arrays of each micro-batch, (micro_batch, ...)."""
        names = tuple(self.arrays)
        for rows in zip(*self.arrays.values(), strict=True):
            yield dict(zip(names, rows, strict=True))


@dataclass(frozen=True)
class StepMetrics:
    """One finished optimizer step, on the host."""

    step: int
    loss: float
    """The summed loss of the whole effective batch over its weight; for language, nats per unmasked token."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    loss_scale: float | None = None
    """What the loss was multiplied by; None where it is not scaled."""

    @property
    def skipped(self) -> bool:
        """Whether a scaled gradient overflowed, so that nothing was updated."""
        return self.loss_scale is not None and not math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class LossSum:
    """Sums over an evaluation."""

    loss: float
    weight: float
    measures: tuple[float, ...] = ()
    """Of the task's measures, in their order; each is divided by the weight."""

    @property
    def mean(self) -> float:
        """The loss per weight."""
        return self.loss / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class MemoryReading:
    """Bytes by the framework's own account; None where the device does not tell."""

    allocated_bytes: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    device_total_bytes: int | None
    peak_reserved_bytes: int | None = None
    """Highest since the peak was reset; None where the allocator keeps no such account."""


@dataclass(frozen=True)
class DeviceFacts:
    """The device an engine computes on."""

    id: str
    name: str
    kind: str
    """cpu | gpu | rocm | apple | tpu"""
    memory_label: str
    total_bytes: int | None


class WeightsError(ValueError):
    """Weights or a state that do not fit the model; the message is one line."""

    cause = "bad_plan"


def check_names(source: StateSource, expected: Iterable[str]) -> None:
    """Raise `WeightsError` unless `source` holds the `expected` tensors and no others."""
    stored = set(source.names())
    wrong = sorted(stored.symmetric_difference(expected))
    if wrong:
        where = "has an unexpected" if wrong[0] in stored else "lacks"
        raise WeightsError(f"checkpoint {where} {wrong[0]} ({len(wrong)} tensors differ)")


class Engine(Protocol):
    """A backend's implementation of training one model on one device."""

    device: DeviceFacts
    versions: Mapping[str, str]
    parameters: int
    trainable_parameters: int

    def platform_lines(self) -> list[str]:
        """What was detected and which optimizations are on, a line each, for a person."""
        ...

    def build(self, plan: Plan, model: Model, total_steps: int, weights: WeightSource) -> None:
        """Allocate the model and the optimizer and load `weights`."""
        ...

    def train_step(self, batch: Batch) -> None:
        """One optimizer step: `backward`, then `update`. Does not wait for the device."""
        ...

    def backward(self, batch: Batch) -> None:
        """The gradients of the batch's mean loss, which stay until `update` takes them; those of an earlier call are
        dropped."""
        ...

    def update(self) -> None:
        """Move the weights by the gradients of the last `backward`, and let go of them: the step is counted. Raises
        `RuntimeError` where there are none."""
        ...

    def assign(self, weights: WeightSource) -> None:
        """Overwrite the trained weights; their average, optimizer state and the count of steps stay. Raises
        `WeightsError` for a tensor of another shape."""
        ...

    def release(self, part: Part) -> None:
        """Keep `part` in host memory alone: its device memory is free until `restore`. `state` still gives it, and
        `load_state` puts what it loads on the device; what else needs it raises `RuntimeError`."""
        ...

    def restore(self, part: Part) -> None:
        """Bring a released `part` back, bit for bit."""
        ...

    def take_metrics(self) -> list[StepMetrics]:
        """Every step since the last call, read from the device in one transfer."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        """Summed loss over `batches` without gradients; one read-back at the end."""
        ...

    def generate(
        self, prompt: list[int], tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        """`tokens` sampled continuations of `prompt`, where the task is language."""
        ...

    def state(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Every tensor needed to continue exactly, one at a time, weights under canonical names
        prefixed `model.` and the rest under `optimizer.`, each a host array."""
        ...

    def load_state(self, source: StateSource) -> None:
        """Continue from `state()`, at the step it was taken. Raises `WeightsError` when the tensors are not those of
        this model and optimizer, by name or shape."""
        ...

    def memory(self) -> MemoryReading:
        """How full the device is now."""
        ...

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""
        ...

    def synchronize(self) -> None:
        """Wait for the device."""
        ...

    def profile(self, folder: Path) -> Recording:
        """Record what is computed from now on; `Recording.stop` writes it into `folder`."""
        ...


class Recording(Protocol):
    """A profile that is being taken."""

    def stop(self) -> None:
        """End it and write its files."""
        ...


class WeightSource(Protocol):
    """Initial weights, one tensor at a time."""

    def tensor(self, name: str) -> NDArray[np.generic]:
        """The tensor of a canonical parameter name, float32 unless stored otherwise."""
        ...


class StateSource(Protocol):
    """A checkpoint's tensors, one at a time."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> NDArray[np.generic]: ...


class EngineFactory(Protocol):
    """What the entry point group `memconsole.backends` names."""

    def __call__(self, plan: Plan, run_directory: Path | None) -> Engine: ...
