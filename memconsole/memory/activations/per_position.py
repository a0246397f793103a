"""Bytes per position of one block of a model without programs."""

from __future__ import annotations

import msgspec


class BlockBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per position of a micro-batch."""

    kept: int
    """Kept by each block from the forward to the backward pass."""
    again: int
    """Computed again by one block in the backward pass."""
    forward: int
    """Temporaries of one block in the forward pass."""
    backward: int
    """Temporaries of one block in the backward pass."""
    evaluation: int
    """Everything of one block in an evaluation."""
    outside: int
    """Kept by the projections before the blocks."""
