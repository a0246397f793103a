"""Linear layers. On AMD processors with AVX-512 their large products in fp32 are computed by oneDNN.

torch computes fp32 products on a CPU by MKL, which on these processors reaches about 85 % of the rate of oneDNN
(`tests/bench/products.py`). On Intel processors both reach the same rate. The product for the weight's gradient stays
with MKL: oneDNN's linear layer would need a transposed copy of an operand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.machine.processor import prefers_onednn

LEAST = 2**27
"""Multiply-adds from which a product goes to oneDNN. Calls from Python take about as long as a smaller one would save."""


class Linear(nn.Linear):
    """x Wᵀ + b in the compute precision."""

    ends_checkpoint = False
    """Whether a checkpointed block ends here. torch recomputes a block up to the last tensor that its backward pass
    reads. Its own linear layer registers its input before its product, so that the product is not computed again."""

    def forward(self, x: Tensor) -> Tensor:
        function = F.linear if self.ends_checkpoint else linear
        return function(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times weight (N, K) transposed, plus bias (N,), as `F.linear`; differentiable once."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)
    return found


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same without a gradient."""
    if not _by_onednn(x, matrix):
        return F.linear(x, matrix, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    """Keeps its input and the weight if a gradient needs them, as a linear layer of torch does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        by_weight = rows.T @ x.flatten(0, -2) if of_weight else None
        by_bias = rows.sum(0) if of_bias else None
        return product(gradient, weight.T) if of_x else None, by_weight, by_bias


def _by_onednn(x: Tensor, matrix: Tensor) -> bool:
    """Whether oneDNN computes the product of these operands. The compiler chooses its own kernels."""
    return (
        x.device.type == "cpu"
        and x.dtype == matrix.dtype == torch.float32
        and x.numel() * matrix.shape[0] >= LEAST
        and _is_faster()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


@lru_cache(maxsize=1)
def _is_faster() -> bool:
    return torch.backends.mkldnn.is_available() and prefers_onednn()
