"""Causal attention with tanh-capped scores (Gemma 2) or with dropout of the attention weights, as two operators: one for
the forward and one for the backward pass.

torch's own kernels have no cap, and those of a CPU have no dropout. Composed of ordinary operators, attention would hold
the scores of all queries at once. Here they exist for `QUERIES` queries at a time and are computed again in the backward
pass (Rabe and Staats 2021). Because the forward pass is one operator, checkpointing can keep its result.

"Shares" are the attention weights: the softmax of the scores. Letters: B rows, A heads of queries, K heads of keys,
G = A / K, T queries, S keys, D head size, n queries of a part. A query sees the keys up to its own position; if there are
more keys than queries, the queries are the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memconsole_torch.models.operator import operator

QUERIES = 128
"""Queries whose scores exist at a time."""


@operator(
    "capped_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, float cap, int key=0, float rate=0.0)"
    " -> Tensor",
)
def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float,
    key: int = 0,
    rate: float = 0.0,
) -> Tensor:
    """Attention of queries (B, A, T, D) over keys and values (B, K, S, D) with the scores
    ``cap · tanh(scale · q·k / cap)``, or ``scale · q·k`` if `cap` is 0. `mask`, (T, S) or (B, 1, T, S), is added to
    them. Shares are dropped at `rate` by the mask of `key`."""
    out = _like_queries(q)
    k, v = k.contiguous(), v.contiguous()
    for start, stop, last in _parts(q, k):
        shares = _bent(q[:, :, start:stop], k[:, :, :last], scale, cap).mul_(cap or 1.0)
        _into_shares(shares, mask, start, stop, k.shape[0])
        if rate:
            shares.mul_(_kept(shares, key, start, rate)).div_(1.0 - rate)
        found = torch.bmm(shares.to(v.dtype), _joined(v[:, :, :last]))
        out[:, :, start:stop] = found.view(q.shape[0], q.shape[1], stop - start, -1)
        del shares, found  # before the next part's scores
    return out


@operator(
    "capped_attention_backward",
    "(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, float cap,"
    " int key=0, float rate=0.0) -> (Tensor, Tensor, Tensor)",
)
def capped_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float,
    key: int = 0,
    rate: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k and v. Those of keys and values are summed in fp32."""
    by_q = _like_queries(q)
    by_k = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    by_v = torch.zeros_like(by_k)
    keys, values = k.contiguous(), v.contiguous()
    for start, stop, last in _parts(q, k):
        part = q[:, :, start:stop]
        bent = _bent(part, keys[:, :, :last], scale, cap)
        shares = bent * (cap or 1.0)
        _into_shares(shares, mask, start, stop, k.shape[0])
        kept = _kept(shares, key, start, rate) if rate else None
        left = shares if kept is None else (shares * kept).div_(1.0 - rate)
        slope = _grouped(gradient[:, :, start:stop], k.shape[1])  # (B·K, G·n, D)
        by_v.flatten(0, 1)[:, :last] += torch.bmm(left.to(v.dtype).mT, slope)
        del left
        back = torch.bmm(slope, _joined(values[:, :, :last]).mT).float()
        if kept is not None:
            back.mul_(kept).div_(1.0 - rate)
        del kept
        back.mul_(shares)
        back.addcmul_(shares, back.sum(-1, keepdim=True), value=-1)  # softmax
        del shares
        if cap:
            back.mul_(bent.square_().neg_().add_(1))  # tanh
        back.mul_(scale)
        del bent
        narrow = back.to(q.dtype)
        del back
        found = torch.bmm(narrow, _joined(keys[:, :, :last]))
        by_q[:, :, start:stop] = found.view(part.shape)
        by_k.flatten(0, 1)[:, :last] += torch.bmm(narrow.mT, _grouped(part, k.shape[1]))
        del narrow, found, slope
    return by_q, by_k.to(k.dtype, copy=False), by_v.to(v.dtype, copy=False)


@capped_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return _like_queries(q)


@capped_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_queries(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, mask)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = capped_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return (*found, None, *(None for _ in ctx.numbers))


capped_attention.register_autograd(_backward, setup_context=_keep)

OPERATOR = capped_attention.overload
BACKWARD_OPERATOR = capped_attention_backward.overload


def forward_workspace(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[int]:
    """Bytes that the operator allocates in addition to its result: the scores of a part, also in 16 bits if they are
    computed so, and the mask of those that are dropped; its queries; keys and values, if they are not contiguous."""
    return _workspace(4 + _dropping(rest), q, k, v)


def backward_workspace(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[int]:
    """The same for the backward pass, which holds the scores three times, and sums gradients in fp32."""
    sums = [] if k.element_size() == 4 else [k.nbytes, v.nbytes]
    dropped = 4 + _dropping(rest) if _dropping(rest) else 0
    return _workspace(12 + dropped, q, k, v) + sums


def _dropping(rest: tuple[Any, ...]) -> int:
    """Bytes of the dropout mask for one share. `rest` is (mask, scale, cap), then key and rate if they are given."""
    return int(len(rest) > 4 and rest[4] > 0)


def _workspace(widths: int, q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    batch, heads, length, width = q.shape
    queries = batch * heads * min(QUERIES, length)
    narrow = q.element_size() if q.element_size() < 4 else 0
    moved = [x.nbytes for x in (k, v) if not x.is_contiguous()]
    scores = queries * k.shape[2]
    return [widths * scores, narrow * scores, q.element_size() * queries * width, *moved]


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """For each part of the queries: its first query, the query after its last one, and how many keys the last one sees."""
    length, keys = q.shape[2], k.shape[2]
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        yield start, stop, keys - length + stop


def _bent(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """``tanh(scale · q·k / cap)`` of queries (B, A, n, D) and keys (B, K, S, D), fp32 (B·K, G·n, S); ``scale · q·k`` if
    `cap` is 0."""
    scores = torch.bmm(_grouped(q, k.shape[1]), _joined(k).mT).float()
    return scores.mul_(scale / cap).tanh_() if cap else scores.mul_(scale)


def _kept(shares: Tensor, key: int, start: int, rate: float) -> Tensor:
    """Which shares of the queries from `start` on are not dropped."""
    generator = torch.Generator(device=shares.device).manual_seed((key + start) % 2**63)
    mask = torch.empty(shares.shape, dtype=torch.bool, device=shares.device)
    return mask.bernoulli_(1.0 - rate, generator=generator)


def _into_shares(scores: Tensor, mask: Tensor | None, start: int, stop: int, batch: int) -> None:
    """Overwrite capped scores (B·K, G·n, S) with their softmax."""
    count, last = stop - start, scores.shape[-1]
    if mask is None:
        own = scores.view(-1, count, last)[..., last - count :]  # the keys of these queries
        ahead = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu_(1)
        own.masked_fill_(ahead, -math.inf)
    else:
        part = mask[..., start:stop, :last]
        wide = scores.view(batch, -1, count, last)
        wide += part
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    scores.div_(scores.sum(-1, keepdim=True))


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Queries (B, A, n, D) as (B·K, G·n, D)."""
    batch, all_heads, count, width = x.shape
    return x.reshape(batch * heads, all_heads // heads * count, width)


def _joined(x: Tensor) -> Tensor:
    """Keys (B, K, S, D), contiguous but for their number, as (B·K, S, D)."""
    return x.flatten(0, 1)


def _like_queries(q: Tensor) -> Tensor:
    """An empty tensor in the shape of the queries, with the memory layout (B, T, A, D) that the next product reads."""
    batch, heads, length, width = q.shape
    return q.new_empty(batch, length, heads, width).transpose(1, 2)
