"""Cross-entropy of the head's logits: from full logits, or in chunks of tokens so that they never
all exist.

All functions take hidden states (..., H), the head's matrix (V, H) and int targets (...). They
return the summed nats of the unmasked targets times `share`, as an fp32 scalar. `share` is applied
before anything is rounded to 16 bits, because in fp16 sums over many tokens would overflow. With a
`cap`, the logits x are cap · tanh(x / cap) (Gemma 2). torch's
own `F.linear_cross_entropy` chunks only on request, and sums a bf16 loss in bf16.

A loss that depends on the nats in another way than by their sum has the gradient of a sum with a share for each
target: its derivatives with respect to the nats. Give these as `share` (N, 1), and the loss as `value`, which is returned.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memconsole.plan.tasks.language import MASKED
from memconsole_torch.kernels import launch, loss
from memconsole_torch.models.linear import product

Share: TypeAlias = Tensor | float
ALIGNED = 64
"""A multiple of the vocabulary for which GPUs have fast products of 16-bit matrices: rows of 128 bytes, as nanoGPT pads
GPT-2's vocabulary of 50,257."""
CHUNK_TOKENS = 512
"""Tokens whose logits exist at a time."""
CPU_CACHED = 2**18
"""Logits that one pass over them covers on a CPU: 1 MiB."""
CAPPED = 2**24
"""The same on other devices if the logits are capped. Without a cap, one pass covers all logits."""


def whole(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    share: Share = 1.0,
    cap: float | None = None,
    value: Tensor | None = None,
) -> Tensor:
    """Summed nats from the full logits. Differentiable once."""
    found: Tensor = _Whole.apply(hidden, weight, targets, share, cap, value)
    return found


class _Whole(torch.autograd.Function):
    """Overwrites the logits with their gradient in the forward pass, and keeps the gradient.

    Autograd's own operations would keep the log-probabilities and allocate the gradient in addition.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        share: Share,
        cap: float | None,
        value: Tensor | None,
    ) -> Tensor:
        rows, head = _operands(hidden, weight, cap)
        ctx.trained = ctx.needs_input_grad[:2]
        ctx.shape, ctx.kinds = hidden.shape, (hidden.dtype, weight.dtype)
        wanted = any(ctx.trained)
        with torch.autocast(rows.device.type, enabled=False):
            labels = targets.flatten().long()
            nats, slopes = _scored(rows, head, len(weight), labels, share, wanted, cap)
            if wanted:
                ctx.save_for_backward(rows if ctx.trained[1] else None, weight)
                ctx.slopes = slopes
        return nats * share if value is None else value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), slopes, by_rows, by_weight = ctx.saved_tensors, ctx.slopes, None, None
        ctx.slopes = None
        if ctx.trained[0]:
            head = _head(weight, slopes.dtype, slopes.shape[1])
            by_rows = product(slopes, head.T).mul_(scale)
            del head
            by_rows = by_rows.view(ctx.shape).to(ctx.kinds[0])
        if ctx.trained[1]:
            by_weight = (slopes.T @ rows).mul_(scale)
            del slopes
            if len(by_weight) > len(weight):
                by_weight = by_weight[: len(weight)]  # autograd adds to no view in place
            by_weight = by_weight.to(ctx.kinds[1])
        return by_rows, by_weight, None, None, None, None


def chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = CHUNK_TOKENS,
    *,
    share: Share = 1.0,
    cap: float | None = None,
    value: Tensor | None = None,
) -> Tensor:
    """Summed nats, computed from the logits of `chunk` tokens at a time. Differentiable once."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        found: Tensor = _Chunked.apply(hidden, weight, targets, chunk, share, cap, value)
        return found
    nats, _, _ = _over_chunks(hidden, weight, targets, chunk, 1.0, cap, False, False)
    return nats * share


class _Chunked(torch.autograd.Function):
    """Computes both gradients in the forward pass, while a chunk's probabilities exist.

    So the head's matmul is never computed twice. The backward pass only scales the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        share: Share,
        cap: float | None,
        value: Tensor | None,
    ) -> Tensor:
        wanted = hidden.requires_grad, weight.requires_grad
        nats, *ctx.gradients = _over_chunks(hidden, weight, targets, chunk, share, cap, *wanted)
        return nats * share if value is None else value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = (None if g is None else g.mul_(scale) for g in ctx.gradients)
        ctx.gradients = None
        return hidden, weight, None, None, None, None, None


@torch.no_grad()
def nats_of_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    cap: float | None = None,
) -> Tensor:
    """The summed nats of each row's unmasked targets (B,), fp32, from hidden states (B, T, H). Never all logits exist."""
    rows, head = _operands(hidden, weight, cap)
    labels = targets.flatten().long()
    nats = torch.empty(len(labels), dtype=torch.float32, device=rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, len(labels), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            _scored(rows[part], head, len(weight), labels[part], 1.0, False, cap, nats[part])
    return nats.view(targets.shape).sum(-1)


@torch.no_grad()
def _over_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    share: Share,
    cap: float | None,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Summed nats times `share`, and if requested its gradients with respect to `hidden` and, in
    fp32, `weight`."""
    rows, head = _operands(hidden, weight, cap)
    labels = targets.flatten().long()  # (N,)
    wanted = wants_hidden or wants_weight
    nats = torch.zeros((), device=rows.device)
    by_rows = torch.empty_like(rows, dtype=hidden.dtype) if wants_hidden else None
    by_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            x = rows[part]
            own = _share_of(share, part)
            lost, gradient = _scored(x, head, len(weight), labels[part], own, wanted, cap)
            nats += lost
            if gradient is None:
                continue
            if by_rows is not None:
                by_rows[part] = product(gradient, head.T)
            if by_weight is not None and x.dtype == torch.float32:
                by_weight.addmm_(gradient[:, : len(weight)].T, x)
            elif by_weight is not None:
                by_weight += (gradient.T @ x)[: len(weight)]
            del gradient  # free it before the next chunk
    if by_rows is not None:
        by_rows = by_rows.view_as(hidden)
    return nats, by_rows, by_weight


def _scored(
    rows: Tensor,
    head: Tensor,
    vocabulary: int,
    labels: Tensor,
    share: Share,
    wanted: bool,
    cap: float | None,
    each: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Summed nats of rows (N, H) and int64 labels (N,), and if `wanted` the gradient of `share` times the nats with
    respect to the logits (N, V), in the type of the rows. It overwrites the logits. The nats of each label go into `each`
    (N,), if it is given."""
    scores = product(rows, head)
    if launch.runs_on(scores.device):
        nats = loss.into_slopes(scores, labels, share, vocabulary, cap, wanted, each)
        return nats, scores if wanted else None
    scores = _only(scores.float(), vocabulary)
    nats = _into_slopes(scores, labels, share, wanted, cap, each)
    return nats, scores.to(rows.dtype) if wanted else None


def _share_of(share: Share, part: slice) -> Share:
    """The share of some targets, if each has its own."""
    return share[part] if isinstance(share, Tensor) and share.ndim else share


def _operands(hidden: Tensor, weight: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Hidden states (N, H) and the head (V, H) in the precision of matmuls. On a GPU in 16 bits the head has rows of
    zeros up to a multiple of `ALIGNED`: products of other sizes take up to twice as long there."""
    rows = hidden.detach().flatten(0, -2)
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    lacking = 0 if cap is not None else _lacking(kind, rows.dtype, len(weight))
    return rows, _head(weight.detach(), rows.dtype, len(weight) + lacking)


def _lacking(kind: str, dtype: torch.dtype, vocabulary: int) -> int:
    """Rows that are added to the head."""
    return -vocabulary % ALIGNED if kind == "cuda" and dtype.itemsize == 2 else 0


def _head(weight: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The head in `dtype`, with rows of zeros at its end, `rows` in all."""
    if rows == len(weight):
        return weight.to(dtype)
    head = weight.new_zeros((rows, weight.shape[1]), dtype=dtype)
    head[: len(weight)] = weight
    return head


def _only(scores: Tensor, vocabulary: int) -> Tensor:
    """The logits, of which those of added rows become minus infinity: their probability and gradient are 0."""
    if scores.shape[1] > vocabulary:
        scores[:, vocabulary:] = -math.inf
    return scores


def _into_slopes(
    scores: Tensor,
    targets: Tensor,
    share: Share,
    wanted: bool,
    cap: float | None = None,
    each: Tensor | None = None,
) -> Tensor:
    """Summed nats of fp32 logits (N, V) and targets (N,). Overwrites the logits, if `wanted` with
    the gradient of `share` times the nats: softmax - onehot on unmasked rows and 0 on masked ones. The nats of each target
    go into `each` (N,), if it is given.

    On a CPU a few rows at a time, so that they stay in its cache from one operation to the next.
    """
    nats = torch.zeros((), device=scores.device)
    count, vocabulary = scores.shape
    for rows in _passes(count, vocabulary, scores.device.type, cap):
        part, labels = scores[rows], targets[rows]
        counts = (labels != MASKED)[:, None]  # (n, 1)
        labels = labels.clamp(min=0)[:, None]
        bend = None
        if cap is not None:
            part.div_(cap).tanh_()
            bend = part.square().neg_().add_(1) if wanted else None  # the derivative of the cap
            part.mul_(cap)
        picked, most = part.gather(1, labels), part.amax(-1, keepdim=True)
        total = part.sub_(most).exp_().sum(-1, keepdim=True)
        lost = (total.log() + most - picked) * counts
        nats += lost.sum()
        if each is not None:
            each[rows] = lost[:, 0]
        if wanted:
            factor = counts * _share_of(share, rows)
            part.mul_(factor / total).scatter_add_(1, labels, -factor.to(part.dtype))
        if bend is not None:
            part.mul_(bend)
            del bend  # before that of the next rows
    return nats


def _passes(count: int, vocabulary: int, kind: str, cap: float | None) -> list[slice]:
    """The rows of logits (count, vocabulary) that are handled together."""
    at_once = count
    if kind == "cpu" or cap is not None:
        at_once = max(1, (CPU_CACHED if kind == "cpu" else CAPPED) // vocabulary)
    return [slice(start, start + at_once) for start in range(0, count, max(1, at_once))]
