"""Muon's update of matrices, as `memconsole_trainer.techniques.muon` specifies. A separate AdamW
updates the other weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer.matrices import in_parts
from memconsole_torch.techniques.optimizer.rule import BaseRule
from memconsole_trainer.techniques.muon import COEFFICIENTS, EPSILON, MOMENTUM, STEPS, scale


class Muon(BaseRule):
    """Orthogonalized momentum of matrices, in fp32. Weight decay is decoupled. `optimizers.create` allocates the state,
    `momentum`."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "live": 1.0, "rows": 0})

    @torch.no_grad()
    def step(self) -> None:
        """One update, a few matrices at a time, so that temporaries are theirs."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    tensors = p, p.grad, self.state[p]["momentum"]
                    parts = (in_parts(t, p, group) for t in tensors)
                    for part, gradient, momentum in zip(*parts, strict=True):
                        _update(part, gradient, momentum, group)


def _update(p: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    """Update the matrices p (n, rows, columns)."""
    rate = group["lr"] * group["live"]
    momentum.lerp_(gradient, (1 - MOMENTUM) * group["live"])
    update = orthogonalized(gradient.lerp(momentum, MOMENTUM))
    p.mul_(1 - rate * group["weight_decay"])
    p.sub_(update.mul_(rate * scale(p.shape)))


def orthogonalized(x: Tensor) -> Tensor:
    """Approximate U Vᵀ of each matrix U S Vᵀ in x (n, rows, columns) with `STEPS` Newton-Schulz steps. Overwrites `x`.

    With G = X Xᵀ, a step is X ← a X + (b G + c G²) X. It is computed for the transpose if that makes G smaller.
    """
    transposed = x.shape[1] > x.shape[2]
    if transposed:
        x = x.mT
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON))
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT  # (n, m, m)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
        del polynomial
    return x.mT if transposed else x
