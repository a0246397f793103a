"""Causal attention with tanh-capped scores (Gemma 2) or with dropout of the attention weights, as two operators: one for
the forward and one for the backward pass.

torch's own kernels have no cap, and those of a CPU have no dropout. Composed of ordinary operators, attention would hold
the scores of all queries at once. Here they exist for `QUERIES` queries at a time and are computed again in the backward
pass (Rabe and Staats 2021). Because the forward pass is one operator, checkpointing can keep its result.

The attention weights are the softmax of the scores. Letters: B rows, A heads of queries, K heads of keys,
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
    them. Attention weights are dropped at `rate` by the mask of `key`."""
    out = _like_queries(q)
    k, v = k.contiguous(), v.contiguous()
    for start, stop, last in _parts(q, k):
        weights = _scores(q[:, :, start:stop], k[:, :, :last], scale, cap).mul_(cap or 1.0)
        _softmax_(weights, mask, start, stop, k.shape[0])
        if rate:
            weights.mul_(_dropout_mask(weights, key, start, rate)).div_(1.0 - rate)
        part = torch.bmm(weights.to(v.dtype), _by_head(v[:, :, :last]))
        out[:, :, start:stop] = part.view(q.shape[0], q.shape[1], stop - start, -1)
        del weights, part  # before the next part's scores
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
    """Gradients with respect to q, k and v. Those of keys and values are summed in fp32.

    Temporaries are freed as soon as possible, because the scores of a part are large."""
    q_gradient = _like_queries(q)
    k_gradient = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    v_gradient = torch.zeros_like(k_gradient)
    keys, values = k.contiguous(), v.contiguous()
    for start, stop, last in _parts(q, k):
        queries = q[:, :, start:stop]
        tanh = _scores(queries, keys[:, :, :last], scale, cap)
        weights = tanh * (cap or 1.0)
        _softmax_(weights, mask, start, stop, k.shape[0])
        kept = _dropout_mask(weights, key, start, rate) if rate else None
        dropped = weights if kept is None else (weights * kept).div_(1.0 - rate)
        out_gradient = _by_key_head(gradient[:, :, start:stop], k.shape[1])  # (B·K, G·n, D)
        v_gradient.flatten(0, 1)[:, :last] += torch.bmm(dropped.to(v.dtype).mT, out_gradient)
        del dropped
        # The gradient of the weights, which becomes that of the scores step by step.
        score_gradient = torch.bmm(out_gradient, _by_head(values[:, :, :last]).mT).float()
        if kept is not None:
            score_gradient.mul_(kept).div_(1.0 - rate)
        del kept
        score_gradient.mul_(weights)
        # softmax, then tanh
        score_gradient.addcmul_(weights, score_gradient.sum(-1, keepdim=True), value=-1)
        del weights
        if cap:
            score_gradient.mul_(tanh.square_().neg_().add_(1))
        score_gradient.mul_(scale)
        del tanh
        cast = score_gradient.to(q.dtype)
        del score_gradient
        part = torch.bmm(cast, _by_head(keys[:, :, :last]))
        q_gradient[:, :, start:stop] = part.view(queries.shape)
        k_gradient.flatten(0, 1)[:, :last] += torch.bmm(cast.mT, _by_key_head(queries, k.shape[1]))
        del cast, part, out_gradient
    return q_gradient, k_gradient.to(k.dtype, copy=False), v_gradient.to(v.dtype, copy=False)


@capped_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return _like_queries(q)


@capped_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_queries(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, mask)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradients = capped_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, None, *(None for _ in ctx.numbers))


capped_attention.register_autograd(_backward, setup_context=_save)

OPERATOR = capped_attention.overload
BACKWARD_OPERATOR = capped_attention_backward.overload


def forward_workspace(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[int]:
    """Bytes that the operator allocates in addition to its result: the scores of a part, also in 16 bits if they are
    computed so, and the dropout mask; its queries; keys and values, if they are not contiguous."""
    return _workspace(4 + _mask_bytes(rest), q, k, v)


def backward_workspace(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[int]:
    """The same for the backward pass, which holds the scores three times, and sums gradients in fp32."""
    sums = [] if k.element_size() == 4 else [k.nbytes, v.nbytes]
    dropped = 4 + _mask_bytes(rest) if _mask_bytes(rest) else 0
    return _workspace(12 + dropped, q, k, v) + sums


def _mask_bytes(rest: tuple[Any, ...]) -> int:
    """Bytes of the dropout mask for one attention weight. `rest` is (mask, scale, cap), then key and rate if they are given."""
    return int(len(rest) > 4 and rest[4] > 0)


def _workspace(score_bytes: int, q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """Bytes of the temporaries of a part. `score_bytes`: for each score, without its copy in 16 bits."""
    batch, heads, length, width = q.shape
    queries = batch * heads * min(QUERIES, length)
    cast_bytes = q.element_size() if q.element_size() < 4 else 0
    contiguous = [x.nbytes for x in (k, v) if not x.is_contiguous()]
    scores = queries * k.shape[2]
    part_bytes = q.element_size() * queries * width
    return [score_bytes * scores, cast_bytes * scores, part_bytes, *contiguous]


def _parts(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """For each part of the queries: its first query, the query after its last one, and how many keys the last one sees."""
    length, keys = q.shape[2], k.shape[2]
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        yield start, stop, keys - length + stop


def _scores(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """``tanh(scale · q·k / cap)`` of queries (B, A, n, D) and keys (B, K, S, D), fp32 (B·K, G·n, S); ``scale · q·k`` if
    `cap` is 0."""
    scores = torch.bmm(_by_key_head(q, k.shape[1]), _by_head(k).mT).float()
    return scores.mul_(scale / cap).tanh_() if cap else scores.mul_(scale)


def _dropout_mask(weights: Tensor, key: int, start: int, rate: float) -> Tensor:
    """Which attention weights of the queries from `start` on are not dropped."""
    generator = torch.Generator(device=weights.device).manual_seed((key + start) % 2**63)
    mask = torch.empty(weights.shape, dtype=torch.bool, device=weights.device)
    return mask.bernoulli_(1.0 - rate, generator=generator)


def _softmax_(scores: Tensor, mask: Tensor | None, start: int, stop: int, batch: int) -> None:
    """Overwrite capped scores (B·K, G·n, S) of the queries `start` .. `stop` with their softmax, in which `mask`, or the
    causal mask if it is None, counts. `batch` is B."""
    count, last = stop - start, scores.shape[-1]
    if mask is None:
        own = scores.view(-1, count, last)[..., last - count :]  # the keys of these queries
        ahead = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu_(1)
        own.masked_fill_(ahead, -math.inf)
    else:
        part = mask[..., start:stop, :last]
        by_row = scores.view(batch, -1, count, last)
        by_row += part
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    scores.div_(scores.sum(-1, keepdim=True))


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """Queries (B, A, n, D) as (B·K, G·n, D), for K `heads` of keys."""
    batch, all_heads, count, width = x.shape
    return x.reshape(batch * heads, all_heads // heads * count, width)


def _by_head(x: Tensor) -> Tensor:
    """Keys (B, K, S, D), contiguous but for their number, as (B·K, S, D)."""
    return x.flatten(0, 1)


def _like_queries(q: Tensor) -> Tensor:
    """An empty tensor in the shape of the queries, with the memory layout (B, T, A, D) that the next product reads."""
    batch, heads, length, width = q.shape
    return q.new_empty(batch, length, heads, width).transpose(1, 2)
