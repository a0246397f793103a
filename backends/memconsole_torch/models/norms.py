"""The norms of a decoder: LayerNorm and RMSNorm, with statistics in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.models.architecture import Architecture
from memconsole_torch.models.linear import compute_dtype


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016, eq. 4) or RMSNorm of the last dimension, `size`. Gemma's RMSNorm multiplies by `1 + weight`
    instead of `weight`.

    The result is in the compute precision, so that the matmuls that read it share one copy. It is divided by `divisor`.
    Norms of the queries and keys of attention (`of_heads`) are always RMSNorms without bias.
    """

    def __init__(
        self, a: Architecture, size: int, *, of_heads: bool = False, divisor: float = 1.0
    ) -> None:
        super().__init__()
        self.divisor = divisor
        self.eps = a.norm_eps
        self.centered = a.norm == "layernorm" and not of_heads
        self.unit_offset = a.norm_unit_offset
        self.weight = nn.Parameter(torch.empty(size))
        bias = a.biases and not of_heads
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.unit_offset or self.divisor != 1.0:
            weight = weight.float()  # it is in 16 bits if it was gathered from several devices
        if self.unit_offset:
            weight = 1.0 + weight
        if self.divisor != 1.0:
            weight = weight / self.divisor
        dtype = compute_dtype(x)
        if self.centered:
            # Weight and bias are in 16 bits if they were gathered from several devices.
            bias = None if self.bias is None else self.bias.float()
            y = F.layer_norm(x.float(), weight.shape, weight.float(), bias, self.eps)
            return y.to(dtype)
        if has_fused_rms_norm(x) and x.dtype == weight.dtype and self.bias is None:
            return fused_rms_norm(x, weight, self.eps).to(dtype)
        y = RMSNorm.apply(x, weight, self.eps, dtype)
        return y if self.bias is None else y + self.bias.to(dtype)


class Unnormed(nn.Module):
    """Takes the place of a norm that an architecture does not have. It only casts to the compute precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(compute_dtype(x))


def has_fused_rms_norm(x: Tensor) -> bool:
    """Whether torch computes the RMSNorm of `x` in one kernel, which keeps only x and 1/rms for the backward pass."""
    return x.is_cuda


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's RMSNorm of `x` (..., size) with `weight` (size,), both of one dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019, eq. 4), for devices without a fused kernel.

    It keeps x, the weight and 1/rms for the backward pass. Where torch has no fused kernel, its own version consists of
    elementwise operations, which keep a second copy of x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x_fp32 = x.float()
        length = torch.linalg.vector_norm(x_fp32, dim=-1, keepdim=True)  # (..., 1)
        inverse_rms = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        y = (x_fp32 * inverse_rms).mul_(weight)
        # torch 2.11 compiles a cast to the same dtype into wrong gradients.
        return y if y.dtype == dtype else y.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """With n = x / rms and g = gradient · weight, the gradient of x is (g - n · mean(g · n)) / rms, and that of the
        weight is the sum of gradient · n over rows."""
        x, weight, inverse_rms = ctx.saved_tensors
        size = x.shape[-1]
        normed = (x.float() * inverse_rms).reshape(-1, size)
        gradient = gradient.float().reshape(-1, size)
        work = gradient * normed
        weight_gradient = work.sum(0) if ctx.needs_input_grad[1] else None
        mean = torch.mv(work, weight.float()).div_(size)[:, None]  # mean(g · n), (rows, 1)
        torch.mul(gradient, weight, out=work)
        work.addcmul_(normed, mean, value=-1).mul_(inverse_rms.reshape(-1, 1))
        x_gradient = work.view(x.shape)
        return x_gradient.to(x.dtype), weight_gradient, None, None
