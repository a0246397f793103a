"""A mixture of experts (Shazeer et al. 2017) in place of the MLP of a block.

Letters: N tokens, E experts, P pairs of a token and one of its experts, H hidden size, F inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole_torch.models.expert_products import experts_in, experts_out
from memconsole_torch.models.linear import Linear


class Experts(nn.Module):
    """The sum over a token's experts of share · down(silu(gate(x)) · up(x))."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.picked, self.normalized = a.experts_per_token, a.normalized_shares
        self.router = Linear(a.hidden_size, a.experts, bias=False)
        self.gate = Stack(a.experts, a.intermediate_size, a.hidden_size)
        self.up = Stack(a.experts, a.intermediate_size, a.hidden_size)
        self.down = Stack(a.experts, a.hidden_size, a.intermediate_size)
        self.balance = Balance()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # (N, H)
        shares, picked = self.routed(rows)
        into = (*self.gate.stored, *self.up.stored, self.gate.rows)
        gates, ups, order, counts = experts_in(rows, picked, *into)
        y = experts_out(gates, ups, order, counts, shares, *self.down.stored, self.down.rows)
        return y.view(x.shape)  # type: ignore[no-any-return,unused-ignore]

    def routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The share of each picked expert, fp32 (N, picked), and its number, for rows (N, H)."""
        scores = self.router(rows).float().softmax(-1)  # (N, E)
        shares, picked = scores.topk(self.picked)
        if self.balance.weight and torch.is_grad_enabled():
            scores = Balanced.apply(scores, picked, self.balance.weight * self.balance.scale)
            shares = scores.gather(-1, picked)
        return (shares / shares.sum(-1, keepdim=True) if self.normalized else shares), picked


class Balance:
    """The loss that spreads tokens over experts, of all blocks of a model."""

    weight = 0.0
    """Its weight in one block."""
    scale: float | Tensor = 1.0
    """What the loss of the current micro-batch is multiplied by."""


class Balanced(torch.autograd.Function):
    """The router's scores (N, E), as they are. Their gradient is that of the model's loss plus that of the loss for balance,
    weight · E · sum over experts of (share of tokens that go to it) · (mean score) (Fedus et al. 2022, eq. 4 to 6).

    The shares of tokens count as constants.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, picked: Tensor, weight: float | Tensor) -> Tensor:
        tokens, experts = scores.shape
        counts = scores.new_zeros(experts)
        counts.scatter_add_(0, picked.flatten(), counts.new_ones(1).expand(picked.numel()))
        ctx.slope = counts * (weight * experts / tokens**2)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient + ctx.slope, None, None


def balance(plan: Plan, a: Model, blocks: Iterable[Any]) -> Balance | None:
    """The loss for balance of a model's blocks, in which it has the plan's weight divided by their number; None if there
    is none."""
    weight = plan.train.expert_balance or 0.0
    if not weight or not isinstance(a, Architecture) or not a.experts:
        return None
    found = Balance()
    found.weight = weight / a.layers
    for block in blocks:
        block.mlp.balance = found
    return found


class Stack(nn.Module):
    """One matrix (rows, inputs) of each expert, as one weight (E * rows, inputs)."""

    def __init__(self, experts: int, rows: int, inputs: int) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(experts * rows, inputs))

    @property
    def stored(self) -> tuple[Tensor, Tensor | None]:
        """The weight, and the scales of its codes if it is stored in codes."""
        return self.weight, None
