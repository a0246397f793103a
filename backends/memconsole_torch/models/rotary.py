"""Rotary position embeddings: they encode a token's position as a rotation of its queries and keys (Su et al. 2021,
arXiv:2104.09864).

Letters in shapes: B rows, A heads, T tokens, D head size, R elements of a head that rotate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memconsole.plan.models.architecture import Architecture

Rotation = tuple[Tensor, ...]
"""Cosines and sines of the angles of every position, fp32 (T, R / 2) each. They are (B, 1, T, R / 2) if positions start
again with every document of a row. Two more follow for queries if these are multiplied (`RopeScaling.query_beta`)."""


def rotation_of(
    a: Architecture, length: int, *, local: bool, device: torch.device
) -> Rotation | None:
    """The rotation of positions 0 … length - 1 (Su et al. 2021, §3.2.2) in local or in global layers; None if positions
    are learned."""
    if a.positions == "learned":
        return None
    frequencies = torch.tensor(
        a.angles(length, local=local), dtype=torch.float32, device=device
    )  # (R / 2,)
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)  # (T, R / 2)
    cos, sin = angles.cos(), angles.sin()
    factor = a.rotation_factor(local=local)
    keys = (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)
    if a.rope_scaling is None or not a.scales_queries(length, local=local):
        return keys
    growth = (positions / a.rope_scaling.original_positions).floor().log1p()
    by = 1 + a.rope_scaling.query_beta * growth[:, None]  # (T, 1)
    return (*keys, *(table * by for table in keys))


def rotate_both(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Rotate queries (B, A, T, D) and keys (B, K, T, D), queries by tables of their own if the rotation has them."""
    return rotate(q, rotation[-2:]), rotate(k, rotation[:2])


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first R elements of each head of x (B, A, T, D) by the angles of their positions, whose cosines and sines
    are `rotation`. Element i is paired with element i + R / 2. The other elements stay as they are."""
    if torch.compiler.is_compiling():
        # The compiler gives new tensors a dense layout, and attention's output the layout of its queries. If x is rotated
        # as (B, T, A, D), the output projection reads attention's output without a copy.
        # The angles become (T, 1, R / 2), or (B, T, 1, R / 2) where every document has positions of its own.
        cos, sin = (a[:, None] if a.dim() == 2 else a.transpose(1, 2) for a in rotation)
        return _rotate_pairs(x.transpose(1, 2), cos, sin, 1.0).transpose(1, 2)
    rotated: Tensor = _Rotate.apply(x, *rotation)
    return rotated


class _Rotate(torch.autograd.Function):
    """The rotation in four passes over half of x each. The backward pass rotates by the opposite angles.

    Composed of autograd's own operations it would take three times as many passes. The result has the strides
    of x, so its gradient needs no copy before the gradient of the projection is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(gradient, cos, sin, -1.0), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """x rotated by its angles (`direction` = 1) or by their opposites (-1), computed in fp32: a pair (u, v) becomes
    (u cos - v sin, v cos + u sin)."""
    size = 2 * cos.shape[-1]
    first, second = x[..., :size].float().chunk(2, dim=-1)  # (B, A, T, R / 2)
    if torch.compiler.is_compiling():  # the compiler fuses these, and cannot write into halves
        new_first = first * cos - direction * second * sin
        new_second = second * cos + direction * first * sin
        return torch.cat((new_first.to(x.dtype), new_second.to(x.dtype), x[..., size:]), dim=-1)
    rotated = torch.empty_like(x, dtype=torch.float32)
    halves = (size // 2, size // 2, x.shape[-1] - size)
    new_first, new_second, rest = rotated.split(halves, dim=-1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    rest.copy_(x[..., size:])
    return rotated.to(x.dtype)
