"""Cross-entropy of a language model's logits. Either all logits exist at once (`whole`), or those of a chunk of tokens at a
time (`chunked`).

The functions take hidden states (..., H), the head's matrix (V, H) and int targets (...), of which `MASKED` ones do not
count. They return the sum of the targets' cross-entropy in nats, times `share`, as an fp32 scalar. For a mean, `share` is 1
divided by the number of targets. Gradients are multiplied by `share` before they are rounded to 16 bits, because in fp16 a
gradient that is summed over many tokens would overflow. With a `cap`, the logits x become cap · tanh(x / cap) (Gemma 2).

A loss may depend on the nats in another way than by their sum (DPO does). Then `share`, (N, 1), is its derivative with
respect to the nats of each of the N targets, which gives the right gradients, and `value` is the loss, which is returned.

torch's own `F.linear_cross_entropy` chunks only on request, and sums a bf16 loss in bf16.

Letters in shapes: B rows, T tokens, H hidden size, V vocabulary, N targets, n targets of one part.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memconsole.plan.tasks.language import MASKED
from memconsole_torch.kernels import launch, loss
from memconsole_torch.models.linear import outer, product

Share: TypeAlias = Tensor | float
ALIGNED = 64
"""A multiple of the vocabulary for which GPUs have fast products of 16-bit matrices: rows of 128 bytes, as nanoGPT pads
GPT-2's vocabulary of 50,257."""
CHUNK_TOKENS = 512
"""Tokens whose logits exist at a time in `chunked`."""
CPU_CACHED = 2**18
"""Logits that the softmax handles together on a CPU: 1 MiB, which stays in the processor's cache."""
CAPPED = 2**24
"""The same on other devices if the logits are capped. Without a cap they handle all logits together."""


def whole(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    share: Share = 1.0,
    cap: float | None = None,
    value: Tensor | None = None,
) -> Tensor:
    """Summed nats times `share`, or `value`, from the full logits. Differentiable once."""
    loss: Tensor = _Whole.apply(hidden, weight, targets, share, cap, value)
    return loss


class _Whole(torch.autograd.Function):
    """Overwrites the logits with their gradient in the forward pass, and keeps it for the backward pass.

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
        ctx.needs_hidden, ctx.needs_weight = ctx.needs_input_grad[:2]
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype)
        with_gradient = ctx.needs_hidden or ctx.needs_weight
        with torch.autocast(rows.device.type, enabled=False):
            labels = targets.flatten().long()
            nats, logits_grad = _loss_and_gradient(
                rows, head, len(weight), labels, share, with_gradient, cap
            )
            if with_gradient:
                ctx.save_for_backward(rows if ctx.needs_weight else None, weight)
                ctx.logits_grad = logits_grad
        return nats * share if value is None else value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), logits_grad = ctx.saved_tensors, ctx.logits_grad
        ctx.logits_grad = None  # so that it is freed as soon as both gradients are computed
        hidden_grad = weight_grad = None
        hidden_dtype, weight_dtype = ctx.dtypes
        if ctx.needs_hidden:
            head = _padded_head(weight, logits_grad.dtype, logits_grad.shape[1])
            hidden_grad = product(logits_grad, head.T).mul_(scale)
            del head
            hidden_grad = hidden_grad.view(ctx.shape).to(hidden_dtype)
        if ctx.needs_weight:
            weight_grad = outer(logits_grad, rows).mul_(scale)
            del logits_grad
            if len(weight_grad) > len(weight):
                weight_grad = weight_grad[: len(weight)]  # autograd adds to no view in place
            weight_grad = weight_grad.to(weight_dtype)
        return hidden_grad, weight_grad, None, None, None, None


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
    """Summed nats times `share`, or `value`, from the logits of `chunk` tokens at a time. Differentiable once."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _Chunked.apply(hidden, weight, targets, chunk, share, cap, value)
        return loss
    nats, _, _ = _over_chunks(hidden, weight, targets, chunk, 1.0, cap, False, False)
    return nats * share


class _Chunked(torch.autograd.Function):
    """Computes the gradients of hidden states and head in the forward pass, while a chunk's probabilities exist, so that the
    logits are computed only once. The backward pass only multiplies them by the gradient of the loss."""

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
        needs = hidden.requires_grad, weight.requires_grad
        nats, *ctx.gradients = _over_chunks(hidden, weight, targets, chunk, share, cap, *needs)
        return nats * share if value is None else value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = (None if g is None else g.mul_(scale) for g in ctx.gradients)
        ctx.gradients = None
        return hidden_grad, weight_grad, None, None, None, None, None


@torch.no_grad()
def nats_of_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    cap: float | None = None,
) -> Tensor:
    """The summed nats of each row's targets, fp32 (B,), from hidden states (B, T, H) and targets (B, T). The logits of
    `CHUNK_TOKENS` tokens exist at a time."""
    rows, head = _operands(hidden, weight, cap)
    labels = targets.flatten().long()
    nats = torch.empty(len(labels), dtype=torch.float32, device=rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, len(labels), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            _loss_and_gradient(
                rows[part], head, len(weight), labels[part], 1.0, False, cap, nats[part]
            )
    return nats.view(targets.shape).sum(-1)


@torch.no_grad()
def _over_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    share: Share,
    cap: float | None,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Summed nats, and the gradients of `share` times the nats with respect to `hidden` and, in fp32, `weight`, each None
    unless it is needed."""
    rows, head = _operands(hidden, weight, cap)
    labels = targets.flatten().long()  # (N,)
    with_gradient = needs_hidden or needs_weight
    nats = torch.zeros((), device=rows.device)
    hidden_grad = torch.empty_like(rows, dtype=hidden.dtype) if needs_hidden else None
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            x = rows[part]
            chunk_nats, logits_grad = _loss_and_gradient(
                x, head, len(weight), labels[part], _share_of(share, part), with_gradient, cap
            )
            nats += chunk_nats
            if logits_grad is None:
                continue
            if hidden_grad is not None:
                hidden_grad[part] = product(logits_grad, head.T)
            if weight_grad is not None and x.dtype == torch.float32:
                outer(logits_grad[:, : len(weight)], x, weight_grad)
            elif weight_grad is not None:
                weight_grad += (logits_grad.T @ x)[: len(weight)]
            del logits_grad  # free it before the next chunk
    if hidden_grad is not None:
        hidden_grad = hidden_grad.view_as(hidden)
    return nats, hidden_grad, weight_grad


def _loss_and_gradient(
    rows: Tensor,
    head: Tensor,
    vocabulary: int,
    labels: Tensor,
    share: Share,
    with_gradient: bool,
    cap: float | None,
    nats_of_labels: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Summed nats of hidden states `rows` (n, H) and int64 `labels` (n,). If `with_gradient`, also the gradient of `share`
    times the nats with respect to the logits, (n, V or more) in the dtype of the rows, which overwrites the logits.

    `head` may have more rows than the `vocabulary` (see `_operands`). The nats of each label are written to
    `nats_of_labels` (n,), if it is given.
    """
    logits = product(rows, head)
    if launch.runs_on(logits.device):
        nats = loss.in_place_cross_entropy(
            logits, labels, share, vocabulary, cap, with_gradient, nats_of_labels
        )
        return nats, logits if with_gradient else None
    logits = _without_padding(logits.float(), vocabulary)
    nats = _in_place_cross_entropy(logits, labels, share, with_gradient, cap, nats_of_labels)
    return nats, logits.to(rows.dtype) if with_gradient else None


def _share_of(share: Share, part: slice) -> Share:
    """The share of the targets `part`, if each target has its own."""
    return share[part] if isinstance(share, Tensor) and share.ndim else share


def _operands(hidden: Tensor, weight: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Hidden states (N, H) and the head (V, H) in the precision of matmuls. On a GPU in 16 bits the head is padded with rows
    of zeros to a multiple of `ALIGNED`: products of other sizes take up to twice as long there."""
    rows = hidden.detach().flatten(0, -2)
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    padding = 0 if cap is not None else _padding_rows(kind, rows.dtype, len(weight))
    return rows, _padded_head(weight.detach(), rows.dtype, len(weight) + padding)


def _padding_rows(kind: str, dtype: torch.dtype, vocabulary: int) -> int:
    """How many rows of zeros are added to a head of `vocabulary` rows on a `kind` of device."""
    return -vocabulary % ALIGNED if kind == "cuda" and dtype.itemsize == 2 else 0


def _padded_head(weight: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The head (rows, H) in `dtype`: `weight` (V, H), then zeros."""
    if rows == len(weight):
        return weight.to(dtype)
    head = weight.new_zeros((rows, weight.shape[1]), dtype=dtype)
    head[: len(weight)] = weight
    return head


def _without_padding(logits: Tensor, vocabulary: int) -> Tensor:
    """Set the logits of the head's padding to minus infinity, in place, so that their probability and gradient are 0."""
    if logits.shape[1] > vocabulary:
        logits[:, vocabulary:] = -math.inf
    return logits


def _in_place_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    share: Share,
    with_gradient: bool,
    cap: float | None = None,
    nats_of_targets: Tensor | None = None,
) -> Tensor:
    """Summed nats of fp32 `logits` (n, V) and int64 `targets` (n,). The nats of each target are written to
    `nats_of_targets` (n,), if it is given.

    The logits are overwritten: if `with_gradient`, with the gradient of `share` times the nats, which is share · (softmax -
    onehot), and 0 for masked targets; else with numbers of no use.
    """
    nats = torch.zeros((), device=logits.device)
    count, vocabulary = logits.shape
    for rows in _passes(count, vocabulary, logits.device.type, cap):
        part, labels = logits[rows], targets[rows]
        counts = (labels != MASKED)[:, None]  # (n, 1)
        labels = labels.clamp(min=0)[:, None]
        cap_slope = None
        if cap is not None:
            part.div_(cap).tanh_()
            cap_slope = part.square().neg_().add_(1) if with_gradient else None  # 1 - tanh²
            part.mul_(cap)
        label_logits, largest = part.gather(1, labels), part.amax(-1, keepdim=True)  # (n, 1) each
        total = part.sub_(largest).exp_().sum(-1, keepdim=True)
        part_nats = (total.log() + largest - label_logits) * counts
        nats += part_nats.sum()
        if nats_of_targets is not None:
            nats_of_targets[rows] = part_nats[:, 0]
        if with_gradient:
            factor = counts * _share_of(share, rows)
            part.mul_(factor / total).scatter_add_(1, labels, -factor.to(part.dtype))
        if cap_slope is not None:
            part.mul_(cap_slope)
            del cap_slope  # before that of the next rows
    return nats


def _passes(count: int, vocabulary: int, kind: str, cap: float | None) -> list[slice]:
    """The rows of logits (count, vocabulary) that the softmax handles together. On a CPU they are few, so that they stay in
    its cache from one operation to the next; with a cap, so that the cap's derivative takes little memory."""
    together = count
    if kind == "cpu" or cap is not None:
        together = max(1, (CPU_CACHED if kind == "cpu" else CAPPED) // vocabulary)
    return [slice(start, start + together) for start in range(0, count, max(1, together))]
