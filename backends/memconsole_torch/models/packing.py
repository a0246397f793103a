"""Positions and attention masks of rows that pack several isolated documents.

`documents` (B, T) holds the number of each token's document within its row. Masks are added to the scores of
attention. Their dtype is the compute precision, because every layer would convert another one and keep its own copy. All
global layers share one mask, and all local layers share one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memconsole.plan.models.architecture import Architecture
from memconsole_torch.models.rotary import Rotation


def document_positions(documents: Tensor) -> Tensor:
    """Positions (B, T), int64, counted from the first token of each document."""
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.zeros_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.cummax(index * begins, dim=1).values


def document_rotations(
    a: Architecture,
    documents: Tensor,
    global_rotation: Rotation | None,
    local_rotation: Rotation | None,
) -> tuple[Rotation | None, Rotation | None]:
    """The rotations (B, 1, T, R / 2) of global and of local layers, taken from those of positions 0 … T - 1. None if
    positions are learned or there is no such layer."""
    if global_rotation is None or local_rotation is None:
        return None, None
    positions, local_layers = document_positions(documents), a.local_layers
    return (
        _at(global_rotation, positions) if local_layers < a.layers else None,
        _at(local_rotation, positions) if local_layers else None,
    )


def document_masks(
    a: Architecture, documents: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Masks (B, 1, T, T) of global and of local layers. Both are the same tensor if the window covers a whole row. The
    first is None if there are no global layers."""
    local_layers = a.local_layers
    if not local_layers or not a.windowed(documents.shape[1]):
        shared = _mask(documents, None, dtype)
        return shared, shared
    local_mask = _mask(documents, a.sliding_window, dtype)
    return (_mask(documents, None, dtype) if local_layers < a.layers else None), local_mask


def _mask(documents: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 for the keys that a query may see, else -inf, (B, 1, T, T). A query sees keys of its own document, up to its own
    position and within the window."""
    length = documents.shape[1]
    visible = documents[:, None, :, None] == documents[:, None, None, :]
    in_window = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril_()
    if window is not None:
        in_window.triu_(1 - window)
    visible &= in_window
    hidden = visible.logical_not_()
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -math.inf
    )


def _at(rotation: Rotation, positions: Tensor) -> Rotation:
    """The rotation (B, 1, T, R / 2) of `positions` (B, T)."""
    return tuple(table[positions][:, None] for table in rotation)
