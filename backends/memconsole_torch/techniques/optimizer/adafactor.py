"""Adafactor: second moments of a matrix as one number for each row and one for each column (Shazeer and Stern 2018,
arXiv:1804.04235)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer.matrices import in_parts, matrices
from memconsole_torch.techniques.optimizer.rule import BaseRule

_TINY = float(torch.finfo(torch.float32).tiny)


class Adafactor(BaseRule):
    """Shazeer and Stern 2018, algorithms 4 and 5, without a first moment.

    Second moments decay by 1 - t^-0.8 in step t. The update of a weight is clipped to an RMS of 1 and multiplied by the RMS
    of the weight, at least 1e-3. Each expert's matrix counts as a weight of its own.

    The state of a matrix (rows, columns) is `row` (rows,) and `column` (columns,), or `column` (matrices, columns) if the
    weight holds several matrices; that of another weight is `second`, in its shape.

    torch's own Adafactor reads two scalars per tensor back from the device at each step, and limits the rate by 1/sqrt(t).
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        settings = {"lr": 0.0, "weight_decay": 0.0, "count": 0, "live": 1.0, "rows": 0}
        super().__init__(groups, settings)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() == 2:
                    count = matrices(p, group)
                    shape = (count, p.shape[1]) if count > 1 else (p.shape[1],)
                    self.state[p]["row"] = p.new_zeros(len(p), dtype=torch.float32)
                    self.state[p]["column"] = p.new_zeros(shape, dtype=torch.float32)
                else:
                    self.state[p]["second"] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def step(self) -> None:
        """One update, tensor by tensor, of experts a few matrices at a time."""
        for group in self.param_groups:
            group["count"] = group["count"] + group["live"]
            new_share = _new_share(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "second" in state:
                    _apply(p[None], _unfactored(p.grad, state["second"], new_share)[None], group)
                    continue
                moments = state["row"][:, None], state["column"].view(-1, p.shape[1])
                parts = (in_parts(t, p, group) for t in (p, p.grad, *moments))
                for part, gradient, row, column in zip(*parts, strict=True):
                    _apply(part, _factored(gradient, row, column, new_share), group)


def _new_share(group: dict[str, Any]) -> Any:
    """The weight t^-0.8 of a new square in the second moments; 0 in a skipped step."""
    count, live = group["count"], group["live"]
    if isinstance(count, Tensor):
        return count.clamp(min=1.0) ** -0.8 * live  # it is 0 if every step so far was skipped
    return count**-0.8 * live


def _unfactored(gradient: Tensor, second: Tensor, new_share: Any) -> Tensor:
    """`gradient` / sqrt(second), after `second` has been renewed.

    All moments are 0 if every step so far was skipped; the limit keeps the quotients finite.
    """
    second.lerp_(gradient.square().add_(1e-30), new_share)
    return gradient * second.clamp(min=_TINY).rsqrt()


def _factored(gradient: Tensor, row: Tensor, column: Tensor, new_share: Any) -> Tensor:
    """`gradient` / sqrt(second) of matrices (n, rows, columns), where second = row · column / mean(row).

    `row` (n, rows, 1) and `column` (n, 1, columns) are the moments of the means over each row and each column, which are
    renewed first.
    """
    square = gradient.square().add_(1e-30)
    row.lerp_(square.mean(2, keepdim=True), new_share)
    column.lerp_(square.mean(1, keepdim=True), new_share)
    del square
    row_factor = (row / row.mean(1, keepdim=True).clamp(min=_TINY)).clamp(min=_TINY)
    return (gradient * row_factor.rsqrt()).mul_(column.clamp(min=_TINY).rsqrt())


def _apply(p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    """Update `n` tensors p (n, ...), each by its own part of `update`, which is overwritten."""
    rate = group["lr"] * group["live"]
    update.div_(_rms(update).clamp(min=1.0))
    update.mul_(_rms(p).clamp(min=1e-3))
    p.mul_(1 - rate * group["weight_decay"])
    p.sub_(update.mul_(rate))


def _rms(x: Tensor) -> Tensor:
    """The root mean square (n, 1, ...) of each of the tensors x (n, ...)."""
    axes = tuple(range(1, x.dim()))
    return torch.linalg.vector_norm(x, dim=axes, keepdim=True) / x[0].numel() ** 0.5
