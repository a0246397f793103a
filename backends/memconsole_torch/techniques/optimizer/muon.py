"""Muon's update of matrices, as `memconsole_trainer.techniques.muon` specifies. A separate AdamW
updates the other weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer.rule import OwnRule
from memconsole_trainer.techniques.muon import COEFFICIENTS, EPSILON, MOMENTUM, STEPS, scale


class Muon(OwnRule):
    """Orthogonalized momentum of matrices, in fp32. Weight decay is decoupled."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "live": 1.0})

    @torch.no_grad()
    def step(self) -> None:
        """One update, matrix by matrix, so that temporaries are those of one matrix."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, self.state[p]["momentum"], group)


def _update(p: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    rate = group["lr"] * group["live"]
    momentum.lerp_(gradient, (1 - MOMENTUM) * group["live"])
    update = orthogonalized(gradient.lerp(momentum, MOMENTUM))
    p.mul_(1 - rate * group["weight_decay"])
    p.sub_(update.mul_(rate * scale(p.shape)))


def orthogonalized(x: Tensor) -> Tensor:
    """Approximate U Vᵀ of x = U S Vᵀ with five Newton-Schulz steps. Overwrites `x`."""
    turned = x.shape[0] > x.shape[1]
    if turned:
        x = x.T
    x.div_(torch.linalg.vector_norm(x).clamp(min=EPSILON))
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T  # (m, m)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = torch.addmm(x, polynomial, x, beta=a)
        del polynomial
    return x.T if turned else x
