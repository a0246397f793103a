"""Stochastic rounding of fp32 to bfloat16 on a GPU, in one kernel, bit for bit as
`memconsole_trainer.techniques.rounding` specifies."""

from __future__ import annotations

import torch
from torch import Tensor

from memconsole_torch.kernels import launch
from memconsole_trainer.techniques.rounding import BLOCK, LANES, signed, three_keys

BLOCKS = 4
"""Blocks of elements for each instance."""


def round_into(target: Tensor, values: Tensor, key: tuple[int, int], start: int) -> None:
    """Round contiguous fp32 `values` (n,), a weight's elements from number `start` on, to bf16 `target` (n,)."""
    launch.run(
        "round_stochastically", -(-values.numel() // (BLOCK * BLOCKS)),
        target.view(torch.int16), values.view(torch.int32), values.numel(), start // BLOCK * LANES, *map(signed, three_keys(key)),
        block=BLOCK, lanes=LANES, counters=LANES * BLOCKS,
    )  # fmt: skip
