"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memconsole_torch.techniques.optimizer.rule import BaseRule


class Lion(BaseRule):
    """Chen et al. 2023, algorithm 2. Its state is one fp32 moment, `momentum`, which `optimizers.create` allocates."""

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "weight_decay": 0.0, "live": 1.0})

    @torch.no_grad()
    def step(self) -> None:
        """One update, tensor by tensor, so that the temporary is that of one tensor."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rate, decay = group["lr"] * group["live"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p]["momentum"]
                update = momentum.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.mul_(1 - rate * decay).sub_(update.mul_(rate))
                momentum.lerp_(p.grad, (1 - beta2) * group["live"])
