"""The products of a mixture of experts, as two operators: those into the experts and those out of them, with their gradients.

The pairs of a token and one of its experts are sorted by expert, so that the rows of an expert lie together. On a GPU in
16 bits one call computes the products of all experts (`grouped_mm`), if the hidden size and the inner size are multiples
of 8. Otherwise they are computed expert by expert, for at most `ROWS` rows at a time, and only one expert's matrix at a
time is cast or decoded.

For the backward pass the operators keep their inputs, the gates and ups of all pairs, and the order of the pairs. The
output of an expert is not needed: the gradient of a share is the product of the expert's inner values and their gradient.

Letters: N tokens, E experts, P pairs, H hidden size, F inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memconsole_torch.models.codes import decoded, decoded_part
from memconsole_torch.models.linear import by_onednn, product
from memconsole_torch.models.operator import operator
from memconsole_trainer.techniques.base_storage import BLOCK

ROWS = 1024
"""The most rows of an expert that are computed at a time, where experts are computed one by one."""
PADDED = 64
"""Rows are padded to a multiple of this for oneDNN, which keeps a kernel for each shape of a product. An expert's number of
rows changes from batch to batch, so that kernels would fill hundreds of MiB."""
ALIGNED = 8
"""Widths of rows that `grouped_mm` takes are multiples of this: in 16 bits a row must begin at a multiple of 16 bytes."""


class Held(NamedTuple):
    """The matrices of all experts as they are stored: a weight, or codes and their scales."""

    weight: Tensor
    scales: Tensor | None
    rows: int
    """Rows of one expert."""
    inputs: int

    @property
    def experts(self) -> int:
        """The number of experts."""
        if self.scales is None:
            return len(self.weight) // self.rows
        return len(self.weight) * BLOCK // (self.rows * self.inputs)

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """An expert's matrix (rows, inputs)."""
        if self.scales is None:
            return self.weight[expert * self.rows : (expert + 1) * self.rows].to(dtype)
        shape = self.rows, self.inputs
        start = expert * self.rows * self.inputs
        return decoded_part(self.weight, self.scales, start, shape, dtype)

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """Those of all experts (E, rows, inputs)."""
        if self.scales is None:
            return self.weight.to(dtype).view(-1, self.rows, self.inputs)
        shape = self.experts * self.rows, self.inputs
        return decoded(self.weight, self.scales, shape, dtype).view(-1, self.rows, self.inputs)


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
    """Gates and ups (P, F) of rows x (N, H) that go to the experts `picked` (N, P / N), sorted by expert; the pair of each
    row (P,); and how many rows each expert has (E,)."""
    weights = _pair(x, gate, gate_scales, up, up_scales, inner)
    flat = picked.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(weights[0].experts, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tokens = order // picked.shape[1]
    if grouped(x, inner):
        rows, ends = x.index_select(0, tokens), counts.cumsum(0, dtype=torch.int32)
        found = [F.grouped_mm(rows, w.matrices(x.dtype).mT, offs=ends) for w in weights]
        return found[0], found[1], order, counts
    gates, ups = (x.new_empty(len(order), inner) for _ in range(2))
    for expert, parts in _by_expert(counts):
        for held, into in zip(weights, (gates, ups), strict=True):
            matrix = held.matrix(expert, x.dtype)
            for part in parts:
                into[part] = _times(x.index_select(0, tokens[part]), matrix)
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
    """Gradients with respect to x and both weights; those that are not wanted have no elements."""
    weights, slopes = _pair(x, gate, gate_scales, up, up_scales, inner), (by_gates, by_ups)
    each = len(order) // len(x)
    tokens = order // each
    if grouped(x, inner):
        ends = counts.cumsum(0, dtype=torch.int32)
        by_weights = [gate.new_empty(0), up.new_empty(0)]
        if of_weights:
            rows = x.index_select(0, tokens)
            for index, slope in enumerate(slopes):
                found = F.grouped_mm(slope.mT, rows, offs=ends)
                by_weights[index] = found.flatten(0, 1).to(gate.dtype)
                del found
            del rows
        by_x = x.new_empty(0)
        if of_x:
            by_rows = F.grouped_mm(by_gates, weights[0].matrices(x.dtype), offs=ends)
            by_rows += F.grouped_mm(by_ups, weights[1].matrices(x.dtype), offs=ends)
            by_x = _summed(by_rows, _places(order, each)).to(x.dtype)
        return by_x, by_weights[0], by_weights[1]
    total = torch.zeros(x.shape if of_x else (0,), dtype=torch.float32, device=x.device)
    by_weights = [torch.zeros_like(w) if of_weights else w.new_empty(0) for w in (gate, up)]
    for expert, parts in _by_expert(counts):
        for held, slope, by_weight in zip(weights, slopes, by_weights, strict=True):
            if of_x:
                matrix = held.matrix(expert, x.dtype)
                for part in parts:
                    total.index_add_(0, tokens[part], _times(slope[part], matrix.T).float())
                del matrix
            if of_weights:
                own = by_weight[expert * inner : (expert + 1) * inner]
                for part in parts:
                    own += _outer(slope[part], x.index_select(0, tokens[part]))
    return total.to(x.dtype), by_weights[0], by_weights[1]


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
    held = Held(down, down_scales, hidden, gates.shape[1])
    each = shares.shape[1]
    if grouped(gates, hidden):
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = F.silu(gates).mul_(ups)
        found = F.grouped_mm(inner, held.matrices(gates.dtype).mT, offs=ends)
        del inner
        return _summed(found, _places(order, each), shares).to(gates.dtype)
    total = torch.zeros(len(shares), hidden, dtype=torch.float32, device=gates.device)
    own, tokens = shares.flatten()[order], order // each
    for expert, parts in _by_expert(counts):
        matrix = held.matrix(expert, gates.dtype)
        for part in parts:
            inner = F.silu(gates[part]).mul_(ups[part])
            found = _times(inner, matrix).float()
            del inner
            total.index_add_(0, tokens[part], found.mul_(own[part, None]))
            del found
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
    hidden, each, dtype = gradient.shape[1], shares.shape[1], gates.dtype
    held = Held(down, down_scales, hidden, gates.shape[1])
    own, tokens = shares.flatten()[order, None], order // each  # (P, 1), (P,)
    by_own = torch.empty_like(own)
    by_gates, by_ups = torch.empty_like(gates), torch.empty_like(ups)
    by_weight = down.new_empty(0)
    if grouped(gates, hidden):
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = gradient.index_select(0, tokens)
        back = F.grouped_mm(rows, held.matrices(dtype), offs=ends)
        inner = _into(by_gates, by_ups, by_own, back, gates, ups, own)
        del back
        if of_weight:
            rows.mul_(own)
            by_weight = F.grouped_mm(rows.mT, inner, offs=ends).flatten(0, 1).to(down.dtype)
    else:
        by_weight = torch.zeros_like(down) if of_weight else by_weight
        for expert, parts in _by_expert(counts):
            matrix = held.matrix(expert, dtype)
            for part in parts:
                rows = gradient.index_select(0, tokens[part])
                back = _times(rows, matrix.T)
                each_own = own[part]
                found = by_gates[part], by_ups[part], by_own[part]
                inner = _into(*found, back, gates[part], ups[part], each_own)
                del back
                if of_weight:
                    rows.mul_(each_own)
                    by_weight[expert * hidden : (expert + 1) * hidden] += _outer(rows, inner)
                del rows, inner
            del matrix
    by_shares = torch.empty_like(by_own.flatten())
    by_shares[order] = by_own.flatten()
    return by_gates, by_ups, by_shares.view(shares.shape), by_weight


@experts_in.register_fake
def _(
    x: Tensor, picked: Tensor, gate: Tensor, gate_scales: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inner = rest[-1]
    gates, ups = (x.new_empty(picked.numel(), inner) for _ in range(2))
    count = Held(gate, gate_scales, inner, x.shape[1]).experts
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
    found = experts_out_backward(gradient, *ctx.saved_tensors, ctx.trained)
    by_gates, by_ups, by_shares, by_down = found
    return by_gates, by_ups, None, None, by_shares, by_down if ctx.trained else None, None, None


experts_in.register_autograd(_in_backward, setup_context=_keep_in)
experts_out.register_autograd(_out_backward, setup_context=_keep_out)
INNER_OPERATOR = experts_in.overload


def _into(
    by_gates: Tensor,
    by_ups: Tensor,
    by_own: Tensor,
    back: Tensor,
    gates: Tensor,
    ups: Tensor,
    own: Tensor,
) -> Tensor:
    """Fill in the gradients of gates, ups and shares. `back` is the gradient of the inner values before they are multiplied
    by their share `own`; it is overwritten. Returns the inner values."""
    active = torch.ops.aten.silu.out(gates, out=by_ups)
    inner: Tensor = active * ups
    torch.sum(
        torch.mul(back, inner, out=by_gates), -1, keepdim=True, dtype=by_own.dtype, out=by_own
    )
    back.mul_(own)
    active.mul_(back)
    torch.ops.aten.silu_backward.grad_input(back.mul_(ups), gates, grad_input=by_gates)
    return inner


def _pair(
    x: Tensor,
    gate: Tensor,
    gate_scales: Tensor | None,
    up: Tensor,
    up_scales: Tensor | None,
    inner: int,
) -> tuple[Held, Held]:
    inputs = x.shape[1]
    return Held(gate, gate_scales, inner, inputs), Held(up, up_scales, inner, inputs)


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
    if rows.device.type == "cpu" and rows.dtype != torch.float32:
        slopes, rows = _padded(slopes), _padded(rows)
    return slopes.T @ rows


def _padded(rows: Tensor) -> Tensor:
    spare = -len(rows) % PADDED
    return F.pad(rows, (0, 0, 0, spare)) if spare else rows


def _places(order: Tensor, each: int) -> Tensor:
    """Where the rows of each token's pairs are, (N, P / N)."""
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device)
    return found.view(-1, each)


def _summed(rows: Tensor, places: Tensor, shares: Tensor | None = None) -> Tensor:
    """The sum of each token's rows at `places`, multiplied by their shares if given, in fp32. Always in the same order, so that
    results are repeatable."""
    total = torch.zeros(len(places), rows.shape[1], dtype=torch.float32, device=rows.device)
    for index in range(places.shape[1]):
        part = rows.index_select(0, places[:, index])
        if shares is None:
            total += part
        else:
            total.addcmul_(part, shares[:, index, None])
    return total


def grouped(x: Tensor, width: int) -> bool:
    """Whether one call computes the products of all experts for rows x and rows of `width` elements."""
    return aligned(x.shape[1], width) and has_grouped(x.device, x.dtype)


def aligned(*widths: int) -> bool:
    """Whether rows of these widths begin where `grouped_mm` can read them."""
    return all(width % ALIGNED == 0 for width in widths)


@lru_cache(maxsize=8)
def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this is a GPU on which the products that one call computes for all experts in 16 bits are right, tried with
    small ones."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    try:
        rows, ends = torch.randn(32, 16, device=device).to(dtype), [8, 8, 32]
        weights = torch.randn(3, 24, 16, device=device).to(dtype)
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        y = F.grouped_mm(rows, weights.mT, offs=offsets)
        wanted = torch.cat((rows[:8] @ weights[0].T, rows[8:] @ weights[2].T))
        by_weights = F.grouped_mm(y.mT, rows, offs=offsets)
        own = torch.stack((y[:8].mT @ rows[:8], torch.zeros_like(weights[1]), y[8:].mT @ rows[8:]))
        return bool(
            torch.allclose(y, wanted, 0.05, 0.5) and torch.allclose(by_weights, own, 0.05, 1.0)
        )
    except (AttributeError, RuntimeError):
        return False
