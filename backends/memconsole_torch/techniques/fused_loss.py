"""Cross-entropy of the head's logits: from full logits, or in chunks of tokens so that they never
all exist.

All functions take hidden states (..., H), the head's matrix (V, H) and int targets (...). They
return the summed nats of the unmasked targets times `share`, as an fp32 scalar. `share` is applied
before anything is rounded to 16 bits, because in fp16 sums over many tokens would overflow. torch's
own `F.linear_cross_entropy` chunks only on request, and sums a bf16 loss in bf16.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""The value of a masked target."""
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
    """Summed nats, computed from the logits of `chunk` tokens at a time. Differentiable once."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        found: Tensor = _Chunked.apply(hidden, weight, targets, chunk, share)
        return found
    nats, _, _ = _over_chunks(hidden, weight, targets, chunk, 1.0, False, False)
    return nats * share


class _Chunked(torch.autograd.Function):
    """Computes both gradients in the forward pass, while a chunk's probabilities exist.

    So the head's matmul is never computed twice. The backward pass only scales the gradients.
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
    """Summed nats times `share`, and if requested its gradients with respect to `hidden` and, in
    fp32, `weight`.

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
            scores = F.linear(x, head).float()  # (n, V), overwritten in place by its gradient
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
            del gradient  # free it before the next chunk
    if by_rows is not None:
        by_rows = by_rows.view_as(hidden)
    return nats, by_rows, by_weight
