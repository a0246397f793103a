"""The interface between the engine and a task: its module, its loss and its evaluation sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from memconsole_trainer.engine import Array


class MicroBatch:
    """The arrays of one micro-batch, (micro_batch, ...). Each is copied to the device when it is
    read."""

    def __init__(self, arrays: Mapping[str, Array], place: Callable[[Array], Tensor]) -> None:
        self._arrays, self._place = arrays, place

    def __getitem__(self, name: str) -> Tensor:
        return self._place(self._arrays[name])

    def filled(self, name: str) -> Tensor:
        """The flat places of an array's numbers that are not zero (n,). The host knows them, so that the device is
        not waited for."""
        return self._place(np.flatnonzero(self._arrays[name]))

    def __contains__(self, name: str) -> bool:
        return name in self._arrays


class Task(Protocol):
    """A task in torch: the module, its loss and its evaluation."""

    criterion: Callable[..., Tensor]
    """The function of the module's outputs that `loss` calls. The tracer wraps it, to see where the phase of the loss
    begins."""

    def module(self) -> nn.Module:
        """The model's module. Parameters have their canonical names; blocks are in `layers`; `model` is
        the record of its shape."""
        ...

    def loss(self, module: nn.Module, rows: MicroBatch, share: Tensor | float) -> Tensor:
        """The summed loss of a micro-batch times `share`, a differentiable fp32 scalar."""
        ...

    def sums(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, then the sums of the task's measures, fp32 (1 +
        measures,)."""
        ...

    def outputs(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """The model's outputs for a micro-batch, fp32."""
        ...
