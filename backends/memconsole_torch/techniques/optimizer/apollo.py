"""APOLLO-Mini's update of matrices, as `memconsole_trainer.techniques.apollo` specifies. A separate AdamW updates the other
weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer.matrices import in_parts, matrices
from memconsole_torch.techniques.optimizer.rule import BaseRule
from memconsole_trainer.techniques.apollo import (
    EPSILON,
    GROWTH,
    PERIOD,
    hashed,
    is_tall,
    start_of,
)


class ApolloMini(BaseRule):
    """One factor for the gradient of each matrix. Weight decay is decoupled.

    The state of a weight with n matrices (rows, columns): two moments (n * max(rows, columns),) and `size` (n,), the norms
    of the last update.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        epsilon: float,
        seed: int,
    ) -> None:
        settings = {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": 0.0, "live": 1.0}
        super().__init__(groups, settings | {"count": 0, "rows": 0})
        self._seed = seed
        self._signs: dict[int, Tensor] = {}
        self._period: Any = None
        for group in self.param_groups:
            for p in group["params"]:
                count = matrices(p, group)
                long = max(len(p) // count, p.shape[1])
                for slot in ("exp_avg", "exp_avg_sq"):
                    self.state[p][slot] = p.new_zeros(count * long, dtype=torch.float32)
                self.state[p]["size"] = p.new_zeros(count, dtype=torch.float32)

    @torch.no_grad()
    def step(self) -> None:
        """One update, a few matrices at a time. No temporary has the size of a matrix."""
        for group in self.param_groups:
            group["count"] = group["count"] + group["live"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moments = state["exp_avg"], state["exp_avg_sq"], state["size"]
                parts = (in_parts(t, p, group) for t in (p, p.grad, *moments))
                for part, gradient, first, second, size in zip(*parts, strict=True):
                    signs = self._drawn(part.shape, group["count"], p.device)
                    _update(part, gradient, (first, second, size), signs, group)

    def _drawn(self, shape: tuple[int, ...], count: Any, device: torch.device) -> Tensor:
        """The random signs of the shorter side of matrices of `shape`. They are drawn once in a period, unless only the device
        knows the count."""
        length = min(shape[-2:])
        period = (count - 1) // PERIOD
        if isinstance(count, Tensor):
            return drawn(length, self._seed, period.clamp(min=0).long(), device)
        if period != self._period:
            self._period, self._signs = period, {}
        if length not in self._signs:
            self._signs[length] = drawn(length, self._seed, int(period), device)
        return self._signs[length]


def drawn(length: int, seed: int, period: int | Tensor, device: torch.device) -> Tensor:
    """Random signs, fp32 (length,)."""

    def low(x: Tensor) -> Tensor:
        return x & 0xFFFFFFFF

    places = torch.arange(length, device=device)  # int64
    bits = hashed(low(hashed(places + start_of(seed), low) + period), low)
    return 1.0 - 2.0 * (bits & 1).float()


def _update(
    p: Tensor,
    gradient: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    signs: Tensor,
    group: dict[str, Any],
) -> None:
    """Update the matrices p (n, rows, columns). `state`: the moments (n, long side) and sizes (n, 1)."""
    first, second, size = state
    live, count = group["live"], group["count"]
    if is_tall(p.shape):
        projected = gradient.bmm(signs.expand(len(p), -1)[:, :, None])[:, :, 0]
    else:
        projected = signs.expand(len(p), -1)[:, None].bmm(gradient)[:, 0]
    norm = torch.linalg.vector_norm(projected, dim=1, keepdim=True)  # (n, 1)
    beta1, beta2 = group["betas"]
    first.lerp_(projected, (1 - beta1) * live)
    second.lerp_(projected.square_(), (1 - beta2) * live)
    updates = count.clamp(min=1.0) if isinstance(count, Tensor) else count
    root = second.div(1 - beta2**updates).sqrt_().add_(group["eps"])
    adam = torch.div(first, root, out=root).div_(1 - beta1**updates)
    scale = torch.linalg.vector_norm(adam, dim=1, keepdim=True) / (norm + EPSILON)
    scale *= len(signs) ** 0.5
    whole = scale * torch.linalg.vector_norm(gradient, dim=(1, 2))[:, None]
    limit = torch.where(size > 0, (GROWTH * size / whole).clamp(max=1.0), 1.0)
    size.lerp_(whole * limit, live)
    rate = group["lr"] * live
    p.mul_(1 - rate * group["weight_decay"])
    p.addcmul_(gradient, (scale * limit * rate)[:, :, None], value=-1.0)
