"""Linear layers. On AMD processors with AVX-512 their large products in fp32 are computed by oneDNN.

torch computes fp32 products on a CPU by MKL, which on these processors is slower than oneDNN
(`tests/bench/products.py`). The product for the weight's gradient stays with MKL: for it oneDNN's linear layer would
need a transposed copy of an operand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memconsole.plan.machine.processor import prefers_onednn

LEAST = 2**27
"""Multiply-adds of the smallest product that goes to oneDNN. On a smaller one oneDNN saves less time than the calls
from Python in `_Linear` take."""
LEAST_ROWS = 32
"""Rows of the smallest product that goes to oneDNN. With fewer, reading the matrix takes the time."""


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
    try:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")
    except RuntimeError:
        # oneDNN found no memory for its workspace. MKL needs less; if the result has no room either, torch says so.
        found = F.linear(x, matrix, bias)
    return found


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
        by_weight = rows.T @ x.flatten(0, -2) if of_weight else None
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
        and x.numel() * matrix.shape[0] >= LEAST
        and not torch.is_autocast_enabled("cpu")
        and _is_faster()
    )


@lru_cache(maxsize=1)
def _is_faster() -> bool:
    return torch.backends.mkldnn.is_available() and prefers_onednn()
