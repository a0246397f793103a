"""Decodes matrices of a frozen base on a GPU, in one kernel, as `memconsole_trainer.techniques.base_storage` specifies."""

from __future__ import annotations

from torch import Tensor

from memconsole_torch.kernels import launch
from memconsole_trainer.techniques.base_storage import BLOCK

BLOCKS = 32
"""Blocks for each instance."""


def decode(codes: Tensor, scales: Tensor, pairs: Tensor, out: Tensor) -> None:
    """Write the numbers that `codes` (blocks, bytes) and `scales` (blocks,) stand for into `out` (blocks, 64), of any
    type. `pairs`: the two numbers of every byte of 4-bit codes, (256, 2)."""
    launch.run(
        "dequantize", -(-len(codes) // BLOCKS), out, codes, scales, pairs, len(codes),
        paired=codes.shape[1] < BLOCK, blocks=BLOCKS, block=BLOCK,
    )  # fmt: skip
