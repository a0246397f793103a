"""The products of a mixture of experts, as two operators: those into the experts and those out of them, with their gradients.

The pairs of a token and one of its experts are sorted by expert, so that the rows of an expert lie together. On a GPU in
16 bits one call computes the products of all experts (`grouped_mm`), if the hidden size and the inner size are multiples
of 8. Otherwise they are computed expert by expert, for at most `ROWS` rows at a time, and only one expert's matrix at a
time is cast or decoded.

For the backward pass the operators keep their inputs, the gates and ups of all pairs, and the order of the pairs. The
output of an expert is not needed: the gradient of a share is the dot product of the expert's inner values and their gradient.

Letters in shapes: N tokens, E experts, P pairs, H hidden size, F inner size of an expert. In names, `gates` and `ups` are
the outputs of the matrices `gate` and `up`; the inner values are silu(gates) · ups; `order` lists the pairs sorted by expert;
`by_x` is the gradient of the loss with respect to x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memconsole_torch.models.expert_matrices import ExpertMatrices, grouped
from memconsole_torch.models.linear import by_onednn, outer, outer_by_onednn, product
from memconsole_torch.models.operator import operator

ROWS = 1024
"""The most rows of an expert that are computed at a time, where experts are computed one by one."""
PADDED = 64
"""The number of rows is padded to a multiple of this for oneDNN, which keeps a kernel for each shape of a product. An expert's
number of rows changes from batch to batch: without padding, kernels would fill hundreds of MiB."""

_IN = "Tensor gate, Tensor? gate_scales, Tensor up, Tensor? up_scales, int inner"


@operator("experts_in", f"(Tensor x, Tensor picked, {_IN}) -> (Tensor, Tensor, Tensor, Tensor)")
def experts_in(
    x: Tensor,
    picked: Tensor,
    gate: Tensor,
    gate_scales: Tensor | None,
    up: Tensor,
    up_scales: Tensor | None,
    inner: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gates and ups (P, F), sorted by expert, for rows x (N, H) and their experts `picked` (N, P / N); the order of the pairs
    (P,); and the number of rows of each expert (E,)."""
    weights = _gate_and_up(x, gate, gate_scales, up, up_scales, inner)
    flat = picked.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(weights[0].experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tokens = order // picked.shape[1]
    if grouped(x, inner):
        rows, ends = x.index_select(0, tokens), counts.cumsum(0, dtype=torch.int32)
        products = [F.grouped_mm(rows, w.all(x.dtype).mT, offs=ends) for w in weights]
        return products[0], products[1], order, counts
    gates, ups = (x.new_empty(len(order), inner) for _ in range(2))
    for expert, parts in _by_expert(counts):
        for matrices, outputs in zip(weights, (gates, ups), strict=True):
            matrix = matrices.of(expert, x.dtype)
            for part in parts:
                outputs[part] = _times(x.index_select(0, tokens[part]), matrix)
            del matrix
    return gates, ups, order, counts


@operator(
    "experts_in_backward",
    "(Tensor by_gates, Tensor by_ups, Tensor x, Tensor order, Tensor counts,"
    f" {_IN}, bool of_x, bool of_weights) -> (Tensor, Tensor, Tensor)",
)
def experts_in_backward(
    by_gates: Tensor,
    by_ups: Tensor,
    x: Tensor,
    order: Tensor,
    counts: Tensor,
    gate: Tensor,
    gate_scales: Tensor | None,
    up: Tensor,
    up_scales: Tensor | None,
    inner: int,
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to x (N, H), gate and up; those that are not wanted have no elements."""
    weights = _gate_and_up(x, gate, gate_scales, up, up_scales, inner)
    compute = _in_gradients_together if grouped(x, inner) else _in_gradients_one_by_one
    return compute((by_gates, by_ups), x, order, counts, weights, of_x, of_weights)


@operator(
    "experts_out",
    "(Tensor gates, Tensor ups, Tensor order, Tensor counts, Tensor shares,"
    " Tensor down, Tensor? down_scales, int hidden) -> Tensor",
)
def experts_out(
    gates: Tensor,
    ups: Tensor,
    order: Tensor,
    counts: Tensor,
    shares: Tensor,
    down: Tensor,
    down_scales: Tensor | None,
    hidden: int,
) -> Tensor:
    """The sum over each token's experts of share · down(silu(gate) · up), (N, H), for gates and ups (P, F)."""
    matrices = ExpertMatrices(down, down_scales, hidden, gates.shape[1])
    each = shares.shape[1]  # experts of a token
    if grouped(gates, hidden):
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = F.silu(gates).mul_(ups)
        rows = F.grouped_mm(inner, matrices.all(gates.dtype).mT, offs=ends)
        del inner
        return _sum_by_token(rows, _places(order, each), shares).to(gates.dtype)
    total = torch.zeros(len(shares), hidden, dtype=torch.float32, device=gates.device)
    pair_shares, tokens = shares.flatten()[order], order // each
    for expert, parts in _by_expert(counts):
        matrix = matrices.of(expert, gates.dtype)
        for part in parts:
            inner = F.silu(gates[part]).mul_(ups[part])
            rows = _times(inner, matrix).float()
            del inner
            total.index_add_(0, tokens[part], rows.mul_(pair_shares[part, None]))
            del rows
        del matrix
    return total.to(gates.dtype)


@operator(
    "experts_out_backward",
    "(Tensor gradient, Tensor gates, Tensor ups, Tensor order, Tensor counts, Tensor shares,"
    " Tensor down, Tensor? down_scales, bool of_weight) -> (Tensor, Tensor, Tensor, Tensor)",
)
def experts_out_backward(
    gradient: Tensor,
    gates: Tensor,
    ups: Tensor,
    order: Tensor,
    counts: Tensor,
    shares: Tensor,
    down: Tensor,
    down_scales: Tensor | None,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to gates, ups, shares and the weight, which has no elements if it is not wanted."""
    matrices = ExpertMatrices(down, down_scales, gradient.shape[1], gates.shape[1])
    pair_shares = shares.flatten()[order, None]  # (P, 1)
    tokens = order // shares.shape[1]  # (P,)
    by_gates, by_ups = torch.empty_like(gates), torch.empty_like(ups)
    by_pair_shares = torch.empty_like(pair_shares)
    compute = (
        _out_gradients_together if grouped(gates, gradient.shape[1]) else _out_gradients_one_by_one
    )
    by_weight = compute(
        gradient, (gates, ups, pair_shares), (by_gates, by_ups, by_pair_shares),
        tokens, counts, matrices, of_weight,
    )  # fmt: skip
    by_shares = torch.empty_like(by_pair_shares.flatten())
    by_shares[order] = by_pair_shares.flatten()
    return by_gates, by_ups, by_shares.view(shares.shape), by_weight


@experts_in.register_fake
def _(
    x: Tensor, picked: Tensor, gate: Tensor, gate_scales: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inner = rest[-1]
    gates, ups = (x.new_empty(picked.numel(), inner) for _ in range(2))
    count = ExpertMatrices(gate, gate_scales, inner, x.shape[1]).experts
    order = torch.empty_like(picked).flatten()
    return gates, ups, order, order.new_empty(count)


@experts_in_backward.register_fake
def _(by_gates: Tensor, by_ups: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, gate, _, up, _, _, of_x, of_weights = rest
    by_weights = [torch.empty_like(w) if of_weights else w.new_empty(0) for w in (gate, up)]
    return torch.empty_like(x) if of_x else x.new_empty(0), by_weights[0], by_weights[1]


@experts_out.register_fake
def _(
    gates: Tensor, ups: Tensor, order: Tensor, counts: Tensor, shares: Tensor, *rest: Any
) -> Tensor:
    return gates.new_empty(len(shares), rest[-1])


@experts_out_backward.register_fake
def _(
    gradient: Tensor, gates: Tensor, ups: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, shares, down, _, of_weight = rest
    by_weight = torch.empty_like(down) if of_weight else down.new_empty(0)
    return torch.empty_like(gates), torch.empty_like(ups), torch.empty_like(shares), by_weight


def _keep_in(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, gate, gate_scales, up, up_scales, ctx.inner = inputs
    *_, order, counts = output
    ctx.mark_non_differentiable(order, counts)
    ctx.trained = ctx.needs_input_grad[2]
    ctx.save_for_backward(x, order, counts, gate, gate_scales, up, up_scales)


def _in_backward(ctx: Any, by_gates: Tensor, by_ups: Tensor, *rest: Any) -> tuple[Any, ...]:
    of_x, trained = ctx.needs_input_grad[0], ctx.trained
    by_x, by_gate, by_up = experts_in_backward(
        by_gates, by_ups, *ctx.saved_tensors, ctx.inner, of_x, trained
    )
    weights = (by_gate, None, by_up) if trained else (None, None, None)
    return (by_x if of_x else None, None, *weights, None, None)


def _keep_out(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gates, ups, order, counts, shares, down, down_scales, _ = inputs
    ctx.trained = ctx.needs_input_grad[5]
    ctx.save_for_backward(gates, ups, order, counts, shares, down, down_scales)


def _out_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradients = experts_out_backward(gradient, *ctx.saved_tensors, ctx.trained)
    by_gates, by_ups, by_shares, by_down = gradients
    return by_gates, by_ups, None, None, by_shares, by_down if ctx.trained else None, None, None


experts_in.register_autograd(_in_backward, setup_context=_keep_in)
experts_out.register_autograd(_out_backward, setup_context=_keep_out)
INNER_OPERATOR = experts_in.overload
"""The operator whose outputs, gates and ups, selective checkpointing keeps."""


def _in_gradients_together(
    slopes: tuple[Tensor, Tensor],
    x: Tensor,
    order: Tensor,
    counts: Tensor,
    weights: tuple[ExpertMatrices, ExpertMatrices],
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `experts_in` by one call for all experts. `slopes` are those with respect to gates and ups (P, F)."""
    each = len(order) // len(x)  # experts of a token
    ends = counts.cumsum(0, dtype=torch.int32)
    by_weights = [w.weight.new_empty(0) for w in weights]
    if of_weights:
        rows = x.index_select(0, order // each)
        for index, slope in enumerate(slopes):
            by_weight = F.grouped_mm(slope.mT, rows, offs=ends)  # (E, F, H)
            by_weights[index] = by_weight.flatten(0, 1).to(weights[index].weight.dtype)
            del by_weight
        del rows
    by_x = x.new_empty(0)
    if of_x:
        by_rows = F.grouped_mm(slopes[0], weights[0].all(x.dtype), offs=ends)  # (P, H)
        by_rows += F.grouped_mm(slopes[1], weights[1].all(x.dtype), offs=ends)
        by_x = _sum_by_token(by_rows, _places(order, each)).to(x.dtype)
    return by_x, by_weights[0], by_weights[1]


def _in_gradients_one_by_one(
    slopes: tuple[Tensor, Tensor],
    x: Tensor,
    order: Tensor,
    counts: Tensor,
    weights: tuple[ExpertMatrices, ExpertMatrices],
    of_x: bool,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, expert by expert."""
    tokens = order // (len(order) // len(x))
    total = torch.zeros(x.shape if of_x else (0,), dtype=torch.float32, device=x.device)
    by_weights = [
        torch.zeros_like(w.weight) if of_weights else w.weight.new_empty(0) for w in weights
    ]
    for expert, parts in _by_expert(counts):
        for matrices, slope, by_weight in zip(weights, slopes, by_weights, strict=True):
            if of_x:
                matrix = matrices.of(expert, x.dtype)
                for part in parts:
                    total.index_add_(0, tokens[part], _times(slope[part], matrix.T).float())
                del matrix
            if of_weights:
                by_matrix = by_weight[expert * matrices.rows : (expert + 1) * matrices.rows]
                for part in parts:
                    by_matrix += _outer(slope[part], x.index_select(0, tokens[part]))
    return total.to(x.dtype), by_weights[0], by_weights[1]


def _out_gradients_together(
    gradient: Tensor,
    values: tuple[Tensor, Tensor, Tensor],
    by_values: tuple[Tensor, Tensor, Tensor],
    tokens: Tensor,
    counts: Tensor,
    matrices: ExpertMatrices,
    of_weight: bool,
) -> Tensor:
    """Fill `by_values` with the gradients with respect to `values`: gates, ups (P, F) and shares (P, 1). One call
    multiplies for all experts. Returns the gradient with respect to the weight, without elements if it is not wanted."""
    weight, ends = matrices.weight, counts.cumsum(0, dtype=torch.int32)
    rows = gradient.index_select(0, tokens)
    by_inner = F.grouped_mm(rows, matrices.all(values[0].dtype), offs=ends)
    inner = _fill_gradients(*by_values, by_inner, *values)
    del by_inner
    if not of_weight:
        return weight.new_empty(0)
    rows.mul_(values[2])
    return F.grouped_mm(rows.mT, inner, offs=ends).flatten(0, 1).to(weight.dtype)


def _out_gradients_one_by_one(
    gradient: Tensor,
    values: tuple[Tensor, Tensor, Tensor],
    by_values: tuple[Tensor, Tensor, Tensor],
    tokens: Tensor,
    counts: Tensor,
    matrices: ExpertMatrices,
    of_weight: bool,
) -> Tensor:
    """The same, expert by expert."""
    weight, hidden = matrices.weight, matrices.rows
    by_weight = torch.zeros_like(weight) if of_weight else weight.new_empty(0)
    for expert, parts in _by_expert(counts):
        matrix = matrices.of(expert, values[0].dtype)
        for part in parts:
            rows = gradient.index_select(0, tokens[part])
            by_inner = _times(rows, matrix.T)
            gates, ups, shares = (v[part] for v in values)
            by_gates, by_ups, by_shares = (v[part] for v in by_values)
            inner = _fill_gradients(by_gates, by_ups, by_shares, by_inner, gates, ups, shares)
            del by_inner
            if of_weight:
                rows.mul_(shares)
                by_weight[expert * hidden : (expert + 1) * hidden] += _outer(rows, inner)
            del rows, inner
        del matrix
    return by_weight


def _fill_gradients(
    by_gates: Tensor,
    by_ups: Tensor,
    by_shares: Tensor,
    by_inner: Tensor,
    gates: Tensor,
    ups: Tensor,
    shares: Tensor,
) -> Tensor:
    """Fill in the gradients with respect to gates and ups (n, F) and shares (n, 1). Returns the inner values (n, F).

    `by_inner` (n, F) is the gradient with respect to the inner values, not yet multiplied by the shares; it is overwritten.
    """
    active = torch.ops.aten.silu.out(gates, out=by_ups)
    inner: Tensor = active * ups
    torch.sum(
        torch.mul(by_inner, inner, out=by_gates),
        -1, keepdim=True, dtype=by_shares.dtype, out=by_shares,
    )  # fmt: skip
    by_inner.mul_(shares)
    active.mul_(by_inner)
    torch.ops.aten.silu_backward.grad_input(by_inner.mul_(ups), gates, grad_input=by_gates)
    return inner


def _gate_and_up(
    x: Tensor,
    gate: Tensor,
    gate_scales: Tensor | None,
    up: Tensor,
    up_scales: Tensor | None,
    inner: int,
) -> tuple[ExpertMatrices, ExpertMatrices]:
    """The matrices gate and up of all experts."""
    inputs = x.shape[1]
    return ExpertMatrices(gate, gate_scales, inner, inputs), ExpertMatrices(
        up, up_scales, inner, inputs
    )


def _by_expert(counts: Tensor) -> Iterator[tuple[int, list[slice]]]:
    """Each expert that has rows, with its rows in parts of at most `ROWS`."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        stop = start + count
        if count:
            yield expert, [slice(i, min(i + ROWS, stop)) for i in range(start, stop, ROWS)]
        start = stop


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows (n, K) times matrix (N, K) transposed."""
    count = len(rows)
    if rows.device.type == "cpu" and (rows.dtype != torch.float32 or by_onednn(rows, matrix)):
        rows = _padded(rows)
    return product(rows, matrix)[:count]


def _outer(slopes: Tensor, rows: Tensor) -> Tensor:
    """slopes (n, N) transposed times rows (n, K)."""
    if rows.device.type == "cpu" and (rows.dtype != torch.float32 or outer_by_onednn(slopes, rows)):
        slopes, rows = _padded(slopes), _padded(rows)
    return outer(slopes, rows)


def _padded(rows: Tensor) -> Tensor:
    """`rows` and rows of zeros, up to a multiple of `PADDED`."""
    spare = -len(rows) % PADDED
    return F.pad(rows, (0, 0, 0, spare)) if spare else rows


def _places(order: Tensor, each: int) -> Tensor:
    """The inverse of `order`: the row of each pair of each token, (N, P / N). `each` is P / N."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places.view(-1, each)


def _sum_by_token(rows: Tensor, places: Tensor, shares: Tensor | None = None) -> Tensor:
    """The fp32 sum (N, H) of each token's rows (P, H), which are at its `places` (N, P / N), each multiplied by its share
    (N, P / N) if `shares` are given. The order is always the same, so that results are repeatable."""
    total = torch.zeros(len(places), rows.shape[1], dtype=torch.float32, device=rows.device)
    for index in range(places.shape[1]):
        part = rows.index_select(0, places[:, index])
        if shares is None:
            total += part
        else:
            total.addcmul_(part, shares[:, index, None])
    return total
