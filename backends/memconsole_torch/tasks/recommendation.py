"""Recommendation in torch: the two-level softmax of the next item."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memconsole.plan.models.recommender import Recommender as Shape
from memconsole.plan.plan import Plan
from memconsole.plan.tasks.recommendation import PADDING
from memconsole_torch.models.recommender import Projected, Recommender
from memconsole_torch.tasks.task import MicroBatch
from memconsole_torch.techniques.activations import two_level


class Recommendation:
    """Implements `Task`."""

    criterion: Callable[..., Tensor]

    def __init__(self, plan: Plan, model: Shape) -> None:
        self._model = model
        self.criterion = two_level.nats

    def module(self) -> nn.Module:
        return Recommender(self._model)

    def loss(self, module: nn.Module, rows: MicroBatch, share: Tensor | float) -> Tensor:
        projected: Projected = module(rows["items"])
        return self.criterion(self._model, projected, rows["targets"]) * share

    def sums(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """Nats, then the measures of the ranking of all items."""
        projected: Projected = module(rows["items"])
        return two_level.ranked(self._model, projected, rows["targets"], rows.filled("targets"))

    def outputs(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """log P of every item after the last one of each row (B, C · M)."""
        items = rows["items"]
        projected: Projected = module(items)
        last = ((items != PADDING).sum(1) - 1).clamp(min=0)
        hidden = projected.hidden[torch.arange(len(last), device=last.device), last]
        return two_level.scores(self._model, projected._replace(hidden=hidden))
