"""fp32 slices rounded stochastically to bfloat16, to the bit as `memconsole_trainer.rounding` specifies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memconsole_trainer.rounding import BLOCK, GROUPS, LANES, PARITY, ROTATIONS

CPU_SLICE = 2**17
"""Elements widened at a time: weight and gradient stay in the processor's cache."""
DEVICE_SLICE = 2**22
"""On other devices, where each slice costs some 150 kernel launches."""


def round_into(target: Tensor, wide: Tensor, key: tuple[int, int], start: int) -> None:
    """Round fp32 `wide` (n,), the weight's elements from `start`, to bf16 `target`. Overwrites `wide`."""
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
    """Threefry's two words, int32 (blocks · LANES,) each, of the counters from `first`."""
    signed = [n - 2**32 if n >= 2**31 else n for n in (*key, key[0] ^ key[1] ^ PARITY)]
    x = torch.arange(first, first + blocks * LANES, dtype=torch.int32, device=device)
    y = torch.full_like(x, signed[1])
    x += signed[0]
    turned = torch.empty_like(y)
    for group in range(GROUPS):
        for distance in ROTATIONS[group % 2]:
            x += y
            torch.bitwise_right_shift(y, 32 - distance, out=turned)
            turned &= (1 << distance) - 1
            y <<= distance
            y |= turned
            y ^= x
        x += signed[(group + 1) % 3]
        y += signed[(group + 2) % 3]
        y += group + 1
    return x, y
