"""Cross-entropy of the head's logits: whole, or in chunks of tokens so that they never all exist.

All functions take hidden states (..., H), the head's matrix (V, H) and int targets (...), and return
the summed nats of the unmasked targets as an fp32 scalar, times `share`, which is multiplied in before anything
is rounded to 16 bits: in fp16, sums of many tokens would not fit otherwise. torch's own `F.linear_cross_entropy` chunks
only when asked, and sums a bf16 loss in bf16.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""A target that counts for nothing."""
Share: TypeAlias = Tensor | float
CHUNK_TOKENS = 512
"""Tokens whose logits exist at a time."""


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, *, share: Share = 1.0) -> Tensor:
    """Summed nats from the full fp32 logits."""
    logits = F.linear(hidden, weight).float()  # (B, T, V)
    nats = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten().long(), ignore_index=IGNORE, reduction="sum"
    )
    return nats * share


def chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = CHUNK_TOKENS,
    *,
    share: Share = 1.0,
) -> Tensor:
    """Summed nats from `chunk` tokens' logits at a time; differentiable once."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        found: Tensor = _Chunked.apply(hidden, weight, targets, chunk, share)
        return found
    nats, _, _ = _over_chunks(hidden, weight, targets, chunk, 1.0, False, False)
    return nats * share


class _Chunked(torch.autograd.Function):
    """Makes both gradients in the forward pass, while a chunk's probabilities are at hand.

    The head's matmul is thus never computed twice. Backward scales and hands over.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, share: Share
    ) -> Tensor:
        nats, *ctx.gradients = _over_chunks(
            hidden, weight, targets, chunk, share, hidden.requires_grad, weight.requires_grad
        )
        return nats * share

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight = (None if g is None else g.mul_(scale) for g in ctx.gradients)
        ctx.gradients = None
        return hidden, weight, None, None, None


@torch.no_grad()
def _over_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    share: Share,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Summed nats and, where wanted, gradients of their `share` by `hidden` and, in fp32, by `weight`.

    The gradient of the logits is softmax - onehot on unmasked rows and 0 on masked ones.
    """
    rows = hidden.detach().flatten(0, -2)  # (N, H)
    labels = targets.flatten().long()  # (N,)
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    head = weight.detach().to(rows.dtype)  # (V, H)
    nats = torch.zeros((), device=rows.device)
    by_rows = torch.empty_like(rows, dtype=hidden.dtype) if wants_hidden else None
    by_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
    with torch.autocast(kind, enabled=False):
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            x, y = rows[part], labels[part]
            counts = (y != IGNORE)[:, None]  # (n, 1)
            y = y.clamp(min=0)[:, None]
            scores = F.linear(x, head).float()  # (n, V), in place all the way to its gradient
            picked, most = scores.gather(1, y), scores.amax(-1, keepdim=True)
            total = scores.sub_(most).exp_().sum(-1, keepdim=True)
            nats += ((total.log() + most - picked) * counts).sum()
            if by_rows is None and by_weight is None:
                del scores
                continue
            factor = counts * share
            scores.mul_(factor / total).scatter_add_(1, y, -factor.to(scores.dtype))
            gradient = scores.to(x.dtype)
            del scores
            if by_rows is not None:
                by_rows[part] = gradient @ head
            if by_weight is not None and x.dtype == torch.float32:
                by_weight.addmm_(gradient.T, x)
            elif by_weight is not None:
                by_weight += gradient.T @ x
            del gradient  # before the next chunk's are made
    if by_rows is not None:
        by_rows = by_rows.view_as(hidden)
    return nats, by_rows, by_weight
