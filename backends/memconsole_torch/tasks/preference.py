"""Preferences in torch: the losses of DPO, ORPO and SimPO from the log-likelihoods of the answers of each pair."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole.plan.tasks.language import MASKED
from memconsole.plan.tasks.preference import LEAST_SHARE, weight_and_gamma
from memconsole_torch.tasks.language import Language, hidden_states
from memconsole_torch.tasks.task import MicroBatch
from memconsole_torch.techniques.activations.fused_loss import nats_of_rows


class Preference(Language):
    """Implements `Task`. Rows 0, 2, … are chosen answers, and each is followed by the rejected answer of its pair. The
    formulas are those of `memconsole.plan.tasks.preference`. ORPO and SimPO compare no pair of which an answer has no target."""

    def __init__(self, plan: Plan, architecture: Architecture) -> None:
        super().__init__(plan, architecture)
        self._settings = plan.train
        self._nats, self.criterion = self.criterion, self._summed

    def loss(self, module: nn.Module, rows: MicroBatch, share: Tensor | float) -> Tensor:
        hidden, reference = hidden_states(module, rows), self._reference(rows)
        return self.criterion(hidden, module.head_weight, rows["targets"], reference, share)

    def sums(self, module: nn.Module, rows: MicroBatch) -> Tensor:
        nats = self.outputs(module, rows).neg()
        found = self._pairs(nats, rows["targets"], self._reference(rows))
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
        reference: Tensor | None,
        share: Tensor | float,
    ) -> Tensor:
        """The summed loss times `share`, from hidden states (B, T, H). The head is computed twice: for the log-likelihoods,
        which the derivatives depend on, and for its gradients."""
        nats = nats_of_rows(hidden, head, targets, cap=self.cap)
        pairs = self._pairs(nats, targets, reference)
        own = (pairs.slopes * share)[:, None].expand_as(targets).reshape(-1, 1)
        value = pairs.losses.sum() * share
        return self._nats(hidden, head, targets, share=own, cap=self.cap, value=value)

    def _reference(self, rows: MicroBatch) -> Tensor | None:
        """The log-likelihoods under the reference, if the objective has one."""
        return rows["reference"] if self._settings.objective == "dpo" else None

    @torch.no_grad()
    def _pairs(self, nats: Tensor, targets: Tensor, reference: Tensor | None) -> _Pairs:
        """What the pairs of rows with these nats (B,) and targets (B, T) are worth. `reference` are the log-likelihoods
        under the reference (B,), if the objective has one. Pairs without a target are padding, and count nothing."""
        t = self._settings
        lengths = (targets != MASKED).sum(-1).view(-1, 2)
        answered = lengths > 0
        counts = answered.any(-1)
        if reference is not None:
            compared, growth = counts, t.dpo_beta
            rewards = (growth * -(nats + reference)).view(-1, 2)
        else:
            compared, tokens = answered.all(-1), lengths.clamp(min=1)
            means = nats.view(-1, 2) / tokens
            if t.objective == "simpo":
                rewards, growth = -t.simpo_beta * means, t.simpo_beta / tokens
            else:
                # The probability of all other answers, and how fast the log odds grow with the mean log-likelihood.
                others = torch.expm1(-means).neg()
                steepness = torch.where(others > LEAST_SHARE, 1 / others, 1.0)
                rewards = -means - others.clamp(min=LEAST_SHARE).log()
                growth = steepness / tokens
        rewards = rewards * compared[:, None]
        chosen, rejected = rewards.unbind(-1)
        margins = chosen - rejected
        weight, gamma = weight_and_gamma(t)
        losses = weight * functional.softplus(gamma - margins) * compared
        pull = weight * torch.sigmoid(gamma - margins) * compared
        slopes = torch.stack([pull, -pull], -1) * growth
        if t.objective == "orpo":
            losses = losses + means[:, 0] * answered[:, 0]
            slopes[:, 0] += answered[:, 0] / tokens[:, 0]
        return _Pairs(losses, slopes.view(-1), counts, chosen, rejected)


class _Pairs(NamedTuple):
    """What the pairs of a micro-batch are worth."""

    losses: Tensor
    """The loss of each pair, fp32 (B / 2,)."""
    slopes: Tensor
    """The derivative of a row's pair's loss with respect to the row's nats (B,)."""
    counts: Tensor
    """Whether a pair counts (B / 2,)."""
    chosen: Tensor
    """The reward of the chosen answer of each pair (B / 2,)."""
    rejected: Tensor
