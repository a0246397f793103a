"""Linear layers. On AMD processors with AVX-512 their large products in fp32 are computed by oneDNN.

torch computes fp32 products on a CPU by MKL, which on these processors is slower than oneDNN
(`tests/bench/products.py`). For the product of the weight's gradient, oneDNN's linear layer copies and transposes an
operand. It is worth that only on processors on which it is about twice as fast, and there for a part of the rows at a time,
so that the copies stay small.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memconsole.plan.machine.processor import has_512_bit_units, prefers_onednn

LEAST = 2**27
"""Multiply-adds of the smallest product that goes to oneDNN. On a smaller one oneDNN saves less time than the calls
from Python in `_Linear` take."""
LEAST_FAR = 2**23
"""The same where oneDNN is about twice as fast."""
LEAST_OUTER = 2**25
"""The same of a weight's gradient."""
LEAST_ROWS = 32
"""Rows of the smallest product that goes to oneDNN. With fewer, reading the matrix takes the time."""
OUTER_ROWS = 1024
"""Rows that a weight's gradient is summed over at a time. Their transposed copy stays in the cache."""
OUTER_ELEMENTS = 2**20
"""About how many elements of a weight's gradient are computed at a time, so that few are held beside it."""
OUTER_COLUMNS = 128
"""The transposed copy has at least so many columns, even if more elements are computed then."""


class Linear(nn.Linear):
    """x Wᵀ + b in the compute precision."""

    ends_checkpoint = False
    """Whether a checkpointed block ends with this product. torch recomputes a block up to the last tensor that its
    backward pass reads. Its own linear layer registers its input before its product, so that the product is not
    computed again."""

    def forward(self, x: Tensor) -> Tensor:
        function = F.linear if self.ends_checkpoint else linear
        return function(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times weight (N, K) transposed, plus bias (N,). Large products are differentiable once."""
    if not by_onednn(x, weight):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)
    return found


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same where autograd is not used: the result of a large product has no gradient."""
    if not by_onednn(x, matrix):
        return F.linear(x, matrix, bias)
    return _by_onednn(x, matrix, bias)


def _by_onednn(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """`product` by oneDNN. It copies an `x` that is not contiguous. `matrix` may be transposed; another one that is not
    contiguous would take a hundred times as long."""
    try:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")
    except RuntimeError:
        # oneDNN found no memory for its workspace. MKL needs less; if the result has no room either, torch says so.
        found = F.linear(x, matrix, bias)
    return found


def outer(gradient: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
    """gradient (n, N) transposed times x (n, K): the gradient (N, K) of a weight, added to `total` if that is given."""
    if not outer_by_onednn(gradient, x):
        return gradient.T @ x if total is None else total.addmm_(gradient.T, x)
    # The operand with fewer columns is the one that is copied.
    turned = gradient.shape[1] > x.shape[1]
    few, many = (x, gradient) if turned else (gradient, x)
    columns = _parts(few.shape[1], max(OUTER_COLUMNS, OUTER_ELEMENTS // many.shape[1]))
    if total is None and len(columns) == 1:
        whole = _summed(few, many, columns[0])
        return whole.T.contiguous() if turned else whole
    found = x.new_zeros(gradient.shape[1], x.shape[1]) if total is None else total
    place = found.T if turned else found
    for part in columns:
        place[part] += _summed(few, many, part)
    return found


def _summed(few: Tensor, many: Tensor, columns: slice) -> Tensor:
    """few[:, columns] transposed times many, summed over a part of the rows at a time."""
    parts = _parts(len(many), OUTER_ROWS)
    summed = _by_onednn(few[parts[0], columns].T, many[parts[0]].T, None)
    for part in parts[1:]:
        summed += _by_onednn(few[part, columns].T, many[part].T, None)
    return summed


def _parts(length: int, most: int) -> list[slice]:
    """Nearly equal parts of a length, each at most `most` long."""
    step = -(-length // -(-length // most))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _Linear(torch.autograd.Function):
    """Keeps its input and the weight if a gradient needs them, as a linear layer of torch does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[misc,untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        by_x = product(rows, weight.T).view(*gradient.shape[:-1], -1) if of_x else None
        by_weight = outer(rows, x.flatten(0, -2)) if of_weight else None
        return by_x, by_weight, rows.sum(0) if of_bias else None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Precision of matmuls with `x`: autocast's if it is on, else the dtype of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def by_onednn(x: Tensor, matrix: Tensor) -> bool:
    """Whether oneDNN computes the product of these operands. The compiler chooses its own kernels."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dim() < 2:
        return False
    return (
        x.dtype == matrix.dtype == torch.float32
        and x.numel() >= LEAST_ROWS * x.shape[-1]
        and x.numel() * matrix.shape[0] >= _least()
        and not torch.is_autocast_enabled("cpu")
    )


def outer_by_onednn(gradient: Tensor, x: Tensor) -> bool:
    """Whether `outer` uses oneDNN for these operands."""
    return (
        by_onednn(gradient.T, x.T)
        and gradient.numel() * x.shape[1] >= LEAST_OUTER
        and x.shape[1] >= LEAST_ROWS
        and gradient.is_contiguous()
        and x.is_contiguous()
        and _is_far_faster()
    )


def _least() -> float:
    """Multiply-adds of the smallest product that goes to oneDNN on this machine."""
    if not _is_faster():
        return math.inf
    return LEAST_FAR if _is_far_faster() else LEAST


@lru_cache(maxsize=1)
def _is_faster() -> bool:
    return torch.backends.mkldnn.is_available() and prefers_onednn()


@lru_cache(maxsize=1)
def _is_far_faster() -> bool:
    return _is_faster() and has_512_bit_units()
