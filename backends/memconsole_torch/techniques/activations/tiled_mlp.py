"""The MLP of a block computed for a few tokens at a time (tiled MLP; Bekman et al. 2025, arXiv:2506.13996).

Only the input of the MLP is kept for the backward pass, which computes each tile again. The activations inside the MLP are as
wide as its intermediate size. They exist for one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.tiles import tile_size, tile_tokens

Layer = Callable[[Tensor], Tensor]
"""Maps (..., H) to (..., H), each token by itself."""


def apply(module: nn.Module, architecture: Architecture) -> None:
    """Compute the MLP of every block of `module` in tiles."""
    tokens = tile_tokens(architecture.hidden_size)
    for block in module.layers:  # type: ignore[union-attr,unused-ignore]
        block.mlp.forward = _in_tiles(block.mlp, tokens)


def tiles(tokens: int, most: int) -> Iterator[slice]:
    """The tokens of each tile, at most `most`."""
    size = tile_size(tokens, most)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


def _in_tiles(mlp: nn.Module, most: int) -> Layer:
    """The forward pass of `mlp` in tiles of at most `most` tokens."""
    whole: Layer = mlp.forward

    def forward(x: Tensor) -> Tensor:
        if x.shape[:-1].numel() <= most:
            return whole(x)
        weights = [weight for weight in mlp.parameters() if weight.requires_grad]
        if not torch.is_grad_enabled() or not (weights or x.requires_grad):
            return _output_in_tiles(x, whole, most)
        kept: Tensor = _Kept.apply(x)
        found: Tensor = _Tiled.apply(kept, kept.grad_fn, whole, most, weights, *weights)
        return found

    return forward


def _output_in_tiles(x: Tensor, whole: Layer, most: int) -> Tensor:
    """`whole` of x (..., H), tile by tile."""
    tokens = x.flatten(0, -2)
    output: Tensor | None = None
    for tile in tiles(len(tokens), most):
        y = whole(tokens[tile])
        if output is None:
            output = y.new_empty(len(tokens), y.shape[-1])
        output[tile] = y
    assert output is not None
    return output.view(*x.shape[:-1], -1)


class _Kept(torch.autograd.Function):
    """Keeps x for `_Tiled`.

    torch recomputes a checkpointed block up to the last tensor that its backward pass reads. A function keeps its tensors
    after its forward pass, so that a block that ends with the MLP would be computed to its end. This function keeps x
    before the MLP begins.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Tiled(torch.autograd.Function):
    """`whole` in tiles. The gradients of its weights are summed over the tiles, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, keeper: Any, whole: Layer, most: int, weights: Any, *_: Tensor
    ) -> Tensor:
        ctx.keeper, ctx.whole, ctx.most, ctx.weights = keeper, whole, most, weights
        if keeper is None:  # x has no gradient, so that `_Kept` has kept nothing
            ctx.save_for_backward(x)
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return _output_in_tiles(x, whole, most)

    @staticmethod
    @once_differentiable  # type: ignore[misc,untyped-decorator,unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = (ctx if ctx.keeper is None else ctx.keeper).saved_tensors
        tokens, gradients = x.detach().flatten(0, -2), gradient.flatten(0, -2)
        of_x, weights = ctx.needs_input_grad[0], ctx.weights
        by_x = torch.empty_like(tokens) if of_x else None
        sums: list[Tensor] = []
        kind, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled):
            for tile in tiles(len(tokens), ctx.most):
                inputs = tokens[tile].requires_grad_(of_x)
                output = ctx.whole(inputs)
                wanted = ([inputs] if of_x else []) + weights
                found = list(torch.autograd.grad(output, wanted, gradients[tile]))
                del output
                if by_x is not None:
                    by_x[tile] = found.pop(0)
                if not sums:
                    sums = [one.float() for one in found]
                    continue
                for total in sums:
                    total.add_(found.pop(0))
        by_weights = [total.to(w.dtype) for total, w in zip(sums, weights, strict=True)]
        gradient_of_x = None if by_x is None else by_x.view_as(x)
        return (gradient_of_x, None, None, None, None, *by_weights)
