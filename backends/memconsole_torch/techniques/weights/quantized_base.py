"""Matrices of a frozen base stored as 8- or 4-bit codes, as
`memconsole_trainer.techniques.base_storage` specifies.

A matrix is decoded for one product and then freed. The backward pass keeps only the codes and
decodes it again. So one matrix at a time exists in the compute precision, never the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memconsole.plan.plan import BaseStorage, Plan
from memconsole_torch.models.codes import decoded
from memconsole_torch.models.linear import compute_dtype
from memconsole_torch.models.linear import product as plain_product
from memconsole_trainer.techniques.base_storage import (
    SCALES,
    blocks_of,
    code_bytes,
    is_quantized,
)


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose matrix is stored as codes, named `weight`, and scales. Both are buffers."""

    weight: Tensor
    weight_scales: Tensor

    def __init__(self, linear: nn.Linear, storage: BaseStorage) -> None:
        super().__init__()
        self.bias = linear.bias
        self.shape = linear.out_features, linear.in_features
        register_codes(self, linear, storage)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.weight_scales, self.bias, self.shape)


class QuantizedStack(nn.Module):
    """The matrices of all experts (`models.experts.Stack`), frozen and stored as codes and scales."""

    weight: Tensor
    weight_scales: Tensor

    def __init__(self, stack: Any, storage: BaseStorage) -> None:
        super().__init__()
        self.rows = stack.rows
        register_codes(self, stack, storage)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """The codes and their scales."""
        return self.weight, self.weight_scales


def register_codes(module: nn.Module, linear: nn.Module, storage: BaseStorage) -> None:
    """Give `module` the buffers of the weight of `linear`."""
    assert isinstance(linear.weight, Tensor)
    blocks, device = blocks_of(linear.weight.numel()), linear.weight.device
    codes = torch.empty(blocks, code_bytes(storage), dtype=torch.uint8, device=device)
    module.register_buffer("weight", codes)
    module.register_buffer("weight" + SCALES, torch.empty(blocks, device=device))


def apply(plan: Plan, module: nn.Module) -> None:
    """Replace the layers of `module` whose matrices the plan stores as codes."""
    for p in module.model.parameters():
        if is_quantized(plan, p):
            parent, _, name = p.name.removesuffix(".weight").rpartition(".")
            owner = module.get_submodule(parent)
            kind = QuantizedStack if p.role == "experts" else QuantizedLinear
            setattr(owner, name, kind(getattr(owner, name), plan.optimize.base_storage))


def product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """x Wᵀ + b in the compute precision. W (out, in) is given as codes (blocks, bytes) and scales
    (blocks,)."""
    result: Tensor = _Product.apply(x.to(compute_dtype(x)), codes, scales, bias, shape)
    return result


class _Product(torch.autograd.Function):
    """A linear layer that keeps only the codes of its matrix. Only x has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape, ctx.dtype = shape, x.dtype
        return plain_product(x, decoded(codes, scales, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        codes, scales = ctx.saved_tensors
        matrix = decoded(codes, scales, ctx.shape, ctx.dtype)
        return plain_product(gradient, matrix.T), None, None, None, None
