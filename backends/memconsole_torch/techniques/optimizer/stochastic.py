"""Rounds fp32 slices stochastically to bfloat16, bit for bit as
`memconsole_trainer.techniques.rounding` specifies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memconsole_torch.kernels import launch, rounding
from memconsole_trainer.techniques.rounding import (
    BLOCK,
    INJECTED,
    LANES,
    ROTATIONS,
    signed,
    three_keys,
)

CPU_SLICE = 2**19
"""Elements per slice on a CPU: small enough for the caches, large enough to keep several cores
busy."""
DEVICE_SLICE = 2**22
"""Elements per slice on other devices, where each slice costs several kernel launches, and without Triton some 90."""


def round_into(target: Tensor, wide: Tensor, key: tuple[int, int], start: int) -> None:
    """Round fp32 `wide` (n,), the weight's elements from `start`, to bf16 `target`. Overwrites
    `wide`."""
    before = start % BLOCK
    if before:  # an earlier slice has rounded so many elements of this block
        first = slice(0, min(BLOCK - before, len(target)))
        block = F.pad(wide[first], (before, 0))
        rounded = target.new_empty(len(block))
        _round_from_block(rounded, block, key, start - before)
        target[first] = rounded[before:]
        target, wide, start = target[first.stop :], wide[first.stop :], start + first.stop
    if len(target):
        _round_from_block(target, wide, key, start)


def _round_from_block(target: Tensor, wide: Tensor, key: tuple[int, int], start: int) -> None:
    """As `round_into`, for a `start` that is a multiple of `BLOCK`."""
    if launch.runs_on(wide.device):
        rounding.round_into(target, wide, key, start)
        return
    n = wide.numel()
    blocks = -(-n // BLOCK)
    words = wide.view(torch.int32)
    if n % BLOCK:
        words = F.pad(words, (0, blocks * BLOCK - n))
    planes = words.view(blocks, 4, LANES)
    for half, found in enumerate(_random_words(key, start // BLOCK * LANES, blocks, wide.device)):
        found = found.view(blocks, LANES)
        planes[:, 2 * half] += found & 0xFFFF
        planes[:, 2 * half + 1] += found.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    upper = words[:n].bitwise_right_shift_(16)
    target.view(torch.int16).copy_(upper)


def _random_words(
    key: tuple[int, int], first: int, blocks: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Threefry's two words, int32 (blocks · LANES,) each, of consecutive counters from `first`."""
    keys = three_keys(key)
    x = torch.arange(first, first + blocks * LANES, dtype=torch.int32, device=device)
    y = torch.full_like(x, signed(keys[1]))
    x += signed(keys[0])
    turned = torch.empty_like(y)
    for done, distance in enumerate(ROTATIONS, start=1):
        x += y
        torch.bitwise_right_shift(y, 32 - distance, out=turned)
        turned &= (1 << distance) - 1
        torch.add(turned, y, alpha=1 << distance, out=y)
        y ^= x
        if done % INJECTED == 0:
            group = done // INJECTED
            x += signed(keys[group % 3])
            y += signed(keys[(group + 1) % 3] + group)
    return x, y
