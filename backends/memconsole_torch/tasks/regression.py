"""Regression on windows in torch: masked squared error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memconsole.plan.models.regressor import Regressor as Shape
from memconsole.plan.plan import Plan
from memconsole_torch.models.regressor import Regressor
from memconsole_torch.tasks.task import MicroBatch


class Regression:
    """Implements `Task`."""

    criterion: Callable[..., Tensor]

    def __init__(self, plan: Plan, model: Shape) -> None:
        self._model = model
        self.criterion = squared_error

    def module(self) -> nn.Module:
        return Regressor(self._model)

    def loss(self, module: nn.Module, rows: MicroBatch, share: Tensor | float) -> Tensor:
        outputs = self.outputs(module, rows)
        return self.criterion(outputs, rows["targets"], rows["mask"]) * share

    def sums(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """The squared error of all outputs that count, that of each output, and the absolute error of each."""
        outputs, targets, mask = self.outputs(module, rows), rows["targets"], rows["mask"]
        missed = outputs - targets
        each = (mask * missed.square()).sum(0), (mask * missed.abs()).sum(0)
        return torch.cat([squared_error(outputs, targets, mask)[None], *each])

    def outputs(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """(B, outputs)."""
        outputs: Tensor = module(rows["windows"])
        return outputs


def squared_error(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """The sum over (B, outputs) of mask · (outputs - targets)²."""
    return (mask * (outputs - targets).square()).sum()
