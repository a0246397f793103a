"""Positions and attention masks of rows that pack several isolated documents.

`documents` (B, T) holds each token's document number within its row. The mask is additive and in
the compute precision, because otherwise every layer would convert it and keep its own copy. All
global layers share one mask, as do all local layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memconsole.plan.models.architecture import Architecture

Tables = tuple[Tensor, Tensor]


def restarted(documents: Tensor) -> Tensor:
    """Positions (B, T), int64, counted from the first token of each document."""
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.zeros_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.cummax(index * begins, dim=1).values


def restarting(
    a: Architecture, documents: Tensor, wide: Tables | None, near: Tables | None
) -> tuple[Tables | None, Tables | None]:
    """Rotations (B, 1, T, D / 2) of global and of local layers; None if positions are learned or
    there is no such layer."""
    if wide is None or near is None:
        return None, None
    positions, count = restarted(documents), a.local_layers
    return (
        _at(wide, positions) if count < a.layers else None,
        _at(near, positions) if count else None,
    )


def masks(
    a: Architecture, documents: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Masks (B, 1, T, T) of global and of local layers. Both are the same tensor if the window
    covers every row."""
    count = a.local_layers
    if not count or not a.windowed(documents.shape[1]):
        same = mask(documents, None, dtype)
        return same, same
    near = mask(documents, a.sliding_window, dtype)
    return (mask(documents, None, dtype) if count < a.layers else None), near


def mask(documents: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask (B, 1, T, T): 0 where a query may attend (its own document, not ahead, within the
    window), else -inf."""
    length = documents.shape[1]
    seen = documents[:, None, :, None] == documents[:, None, None, :]
    order = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril_()
    seen &= order if window is None else order.triu_(1 - window)
    hidden = seen.logical_not_()
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -math.inf
    )


def _at(tables: Tables, positions: Tensor) -> Tables:
    cos, sin = (table[positions][:, None] for table in tables)
    return cos, sin
