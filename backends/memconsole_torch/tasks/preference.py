"""Preferences in torch: the loss of DPO from the log-likelihoods of the answers of each pair."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole.plan.tasks.language import MASKED
from memconsole_torch.tasks.language import Language, hidden_states
from memconsole_torch.tasks.task import MicroBatch
from memconsole_torch.techniques.activations.fused_loss import nats_of_rows


class Preference(Language):
    """Implements `Task`. Rows 0, 2, … are chosen answers, and each is followed by the rejected answer of its pair."""

    def __init__(self, plan: Plan, architecture: Architecture) -> None:
        super().__init__(plan, architecture)
        self._beta = plan.train.dpo_beta
        self._nats, self.criterion = self.criterion, self._summed

    def loss(self, module: nn.Module, rows: MicroBatch, share: Tensor | float) -> Tensor:
        hidden = hidden_states(module, rows)
        return self.criterion(hidden, module.head_weight, rows["targets"], rows["reference"], share)

    def sums(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        nats = self.outputs(module, rows).neg()
        found = self._pairs(nats, rows["targets"], rows["reference"])
        margins = found.chosen - found.rejected
        sums = found.losses, found.counts * (margins > 0), margins, found.chosen, found.rejected
        return torch.stack([values.sum() for values in sums])

    def outputs(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        """The log-likelihood of each row's unmasked targets, fp32 (B,)."""
        hidden = hidden_states(module, rows)
        head: Tensor = module.head_weight  # type: ignore[assignment,unused-ignore]
        return nats_of_rows(hidden, head, rows["targets"], cap=self.cap).neg()

    def _summed(
        self,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        reference: Tensor,
        share: Tensor | float,
    ) -> Tensor:
        """The summed loss times `share`, from hidden states (B, T, H). The head is computed twice: for the log-likelihoods,
        which the derivatives depend on, and for its gradients."""
        nats = nats_of_rows(hidden, head, targets, cap=self.cap)
        pairs = self._pairs(nats, targets, reference)
        own = (pairs.slopes * share)[:, None].expand_as(targets).reshape(-1, 1)
        value = pairs.losses.sum() * share
        return self._nats(hidden, head, targets, share=own, cap=self.cap, value=value)

    @torch.no_grad()
    def _pairs(self, nats: Tensor, targets: Tensor, reference: Tensor) -> _Pairs:
        """DPO of rows with these nats (B,), targets (B, T) and log-likelihoods under the reference (B,). Pairs without a
        target are padding, and count nothing."""
        counts = (targets != MASKED).any(-1).view(-1, 2).any(-1)
        rewards = (self._beta * -(nats + reference)).view(-1, 2) * counts[:, None]
        chosen, rejected = rewards.unbind(-1)
        margins = chosen - rejected
        losses = functional.softplus(-margins) * counts
        pull = self._beta * torch.sigmoid(-margins) * counts
        return _Pairs(losses, torch.stack([pull, -pull], -1).view(-1), counts, chosen, rejected)


class _Pairs(NamedTuple):
    """What DPO finds of a micro-batch."""

    losses: Tensor
    """The loss of each pair, fp32 (B / 2,)."""
    slopes: Tensor
    """The derivative of a row's pair's loss with respect to the row's nats (B,)."""
    counts: Tensor
    """Whether a pair counts (B / 2,)."""
    chosen: Tensor
    """The reward of the chosen answer of each pair (B / 2,)."""
    rejected: Tensor
