"""The protocol between the training loop and a backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole_trainer.process_group import ProcessGroup

Array = NDArray[np.generic]
STEP = "optimizer.step"
"""Name of the tensor that counts the steps taken."""
Part = Literal["weights", "optimizer", "gradients"]
"""A part of an engine's state that can be released: all weights, including frozen ones and averages;
the optimizer state; the gradients that wait for an update."""
ReleaseMode = Literal["cpu", "pinned", "compress", "reinitialize"]
"""How a part is released. Until it is restored, it is kept in host memory, in page-locked host memory, in 8 bits on its
device, or nowhere (`reinitialize`: the optimizer starts anew)."""


@dataclass(frozen=True)
class Batch:
    """The rows of one optimizer step, or of one evaluation call.

    `arrays` holds the arrays that the task names in `inputs`, each (micro_batches, micro_batch,
    ...). The batch's loss is the loss summed over all rows, divided by `weight`. For language,
    `weight` is the number of unmasked targets.
    """

    arrays: Mapping[str, Array]
    weight: float

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def micro_batches(self) -> Iterator[dict[str, Array]]:
        """Yield the arrays of each micro-batch, (micro_batch, ...)."""
        names = tuple(self.arrays)
        for rows in zip(*self.arrays.values(), strict=True):
            yield dict(zip(names, rows, strict=True))


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one finished optimizer step, read back to the host."""

    step: int
    loss: float
    """Summed loss of the effective batch divided by its weight; for language, nats per unmasked
    token."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    loss_scale: float | None = None
    """Factor the loss was multiplied by; None if the loss is not scaled."""
    undone: bool = False
    """Whether the weights were set back to before the step, whose loss then does not count."""

    @property
    def skipped(self) -> bool:
        """Whether a scaled gradient overflowed, so the step updated nothing."""
        return self.loss_scale is not None and not math.isfinite(self.gradient_norm)


@dataclass(frozen=True)
class LossSum:
    """Sums over an evaluation."""

    loss: float
    weight: float
    measures: tuple[float, ...] = ()
    """Sums of the task's measures, in the task's order. Divide each by the weight."""

    @property
    def mean(self) -> float:
        """The loss divided by the weight."""
        return self.loss / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class MemoryReading:
    """Bytes as the framework counts them; None if the device does not report them."""

    allocated_bytes: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    """What the driver charges this process, its context included."""
    device_total_bytes: int | None
    peak_reserved_bytes: int | None = None
    """Highest value since the peak was reset; None if the allocator does not track it."""


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
    """Weights or a state do not fit the model. The message is one line."""

    cause = "bad_plan"


def check_names(source: StateSource, expected: Iterable[str]) -> None:
    """Raise `WeightsError` unless `source` holds exactly the `expected` tensors."""
    stored = set(source.names())
    wrong = sorted(stored.symmetric_difference(expected))
    if wrong:
        where = "has an unexpected" if wrong[0] in stored else "lacks"
        raise WeightsError(f"checkpoint {where} {wrong[0]} ({len(wrong)} tensors differ)")


OnTokens = Callable[[list[int]], None]
"""Called with tokens that were drawn."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Of these, from the fewest whose probabilities add up to this."""
    seed: int = 0
    stop: Collection[int] = ()
    """Tokens that end the text."""


GREEDY = Sampling()


class Generator(Protocol):
    """Continues rows of tokens."""

    def generate(
        self,
        prompt: list[int],
        tokens: int,
        sampling: Sampling = GREEDY,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        """Sample `tokens` tokens that continue `prompt`, or fewer that end with a stop token. `on_tokens` is called with
        the new tokens as they come, one or some at a time. Only for the language task."""
        ...


class Engine(Generator, Protocol):
    """A backend's implementation of training one model on the devices of this process."""

    process_group: ProcessGroup
    """The processes that train together. Each calls every method that follows in the same order."""
    device: DeviceFacts
    versions: Mapping[str, str]
    parameters: int
    trainable_parameters: int

    def platform_lines(self) -> list[str]:
        """Lines for the log: what was detected and which optimizations are on."""
        ...

    def prepare(self, plan: Plan, model: Model) -> None:
        """Begin work that `build` needs and that does not depend on the data, such as compiling. Optional; `build` waits
        for it, and does it again if its model is another one."""
        ...

    def build(self, plan: Plan, model: Model, total_steps: int, weights: WeightSource) -> None:
        """Allocate the model and the optimizer and load `weights`."""
        ...

    def train_step(self, batch: Batch) -> None:
        """One optimizer step: `backward`, then `update`. Does not wait for the device."""
        ...

    def backward(self, batch: Batch) -> None:
        """Compute the gradients of the batch's mean loss and keep them for `update`. Gradients of
        an earlier call are dropped."""
        ...

    def update(self) -> None:
        """Update the weights with the gradients of the last `backward`, free the gradients and
        count the step. Raises `RuntimeError` if there are no gradients."""
        ...

    def release(self, part: Part, mode: ReleaseMode = "cpu") -> None:
        """Free the device memory of `part` until `restore`. Meanwhile `state` still yields it,
        `load_state` puts what it loads on the device, and any other call that needs it raises
        `RuntimeError`. Only the optimizer state can be compressed or reinitialized."""
        ...

    def restore(self, part: Part) -> None:
        """Bring a released `part` back to the device: bit for bit from host memory; from 8 bits, as
        `techniques.blockwise` rounds; else as before the first step."""
        ...

    def take_metrics(self) -> list[StepMetrics]:
        """Metrics of every step since the last call, read from the device in one transfer."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> LossSum:
        """Sum the loss over `batches` without gradients. Devices other than a CPU are read once, at the
        end."""
        ...

    def outputs(self, batch: Batch) -> Array:
        """The model's outputs for the rows of a batch of one micro-batch, in float32, with the
        weights that are evaluated."""
        ...

    def state(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Yield every tensor needed to continue exactly, one host array at a time. Weights have
        their canonical names prefixed with `model.`, their averages with `ema.`. Snapshots of a hybrid
        run are under `hybrid.`, the rest is under `optimizer.`."""
        ...

    def load_state(self, source: StateSource) -> None:
        """Continue from a `state()`, at the step it was taken. Raises `WeightsError` when names or
        shapes of the tensors do not match this model and optimizer."""
        ...

    def memory(self) -> MemoryReading:
        """The memory in use on the device now."""
        ...

    def memories(self) -> tuple[MemoryReading, ...]:
        """The memory in use on each device of this process; one reading if they cannot be measured separately."""
        ...

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        ...

    def profile(self, folder: Path) -> Recording:
        """Start recording a profile; `Recording.stop` writes it into `folder`."""
        ...


class Recording(Protocol):
    """A profile that is being recorded."""

    def stop(self) -> None:
        """End the recording and write its files."""
        ...


class WeightSource(Protocol):
    """Initial weights, one tensor at a time."""

    def tensor(self, name: str) -> NDArray[np.generic]:
        """The tensor of a canonical parameter name, in float32 unless stored in another type."""
        ...


class StateSource(Protocol):
    """A checkpoint's tensors, one at a time."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> NDArray[np.generic]: ...


class EngineFactory(Protocol):
    """Type of the objects in the entry point group `memconsole.backends`."""

    def __call__(self, plan: Plan, run_directory: Path | None) -> Engine: ...
