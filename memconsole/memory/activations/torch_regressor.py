"""The bytes of a block of the regression transformer in torch, from `memconsole_torch.models.regressor`."""

from __future__ import annotations

from memconsole.memory.activations.per_position import BlockBytes
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.sections.optimize import Checkpointing

STATISTICS = 16
"""Bytes per position of the means and deviations of a block's two norms."""


def block_bytes(model: Regressor, checkpointing: Checkpointing, compute: int) -> BlockBytes:
    """The bytes of one block. The residual stream and the norms are fp32; in 16 bits each layer casts its input."""
    h, f, c = model.hidden_size, model.intermediate_size, compute
    narrow, stream, sums = c < 4, 4 * h, 4 * model.heads
    # What the layers and attention read and make, and what both norms read. In fp32 the input is a part of it.
    whole = c * (8 * h + 2 * f) + (2 * stream if narrow else 0) + STATISTICS + sums
    through_mlp = c * f + (c * h if narrow else 0)
    if checkpointing == "none":
        kept, again, forward, backward = whole, 0, stream, through_mlp
    else:
        # Results that are kept: those that the rest of the block reads, and those used up once it has run again.
        read, used = {
            "full": (0, 0),
            "attention": (c * h + sums, 0),
            "selective": (c * (4 * h + f) + sums, c * 2 * h),
        }[checkpointing]
        kept = stream + read + used
        again = whole - read - used - (0 if narrow else stream)
        forward = stream + 2 * c * f
        backward = max((3 if narrow else 2) * stream, through_mlp)
    return BlockBytes(
        kept=kept,
        again=again,
        forward=forward,
        backward=backward,
        evaluation=2 * stream + 2 * c * f,
        outside=c * model.features if narrow else 0,
    )
