"""The techniques that both backends share, in NumPy: every backend must give exactly these bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memconsole_trainer.techniques.blockwise import (
    BLOCK,
    HALF,
    OFFSET,
    Float32,
    UInt8,
    lookup,
    scales_of,
    values,
)
from memconsole_trainer.techniques.rounding import BLOCK as RANDOM_BLOCK
from memconsole_trainer.techniques.rounding import LANES, threefry

Uint32 = NDArray[np.uint32]


def quantize(array: Float32, *, signed: bool) -> tuple[UInt8, Float32]:
    """Codes (n,) and scales (blocks,) of an array of n elements."""
    flat = array.reshape(-1)
    blocks = np.zeros((scales_of(flat.size), BLOCK), np.float32)
    blocks.reshape(-1)[: flat.size] = flat
    scales = np.abs(blocks).max(axis=1)
    normal = scales >= np.finfo(np.float32).tiny
    shares = blocks * (normal / np.where(normal, scales, np.float32(1)))[:, None]
    rows = ((shares.view(np.int32) + np.int32(HALF)) >> 16) + OFFSET
    return lookup(signed=signed)[rows].reshape(-1)[: flat.size], scales


def dequantize(codes: UInt8, scales: Float32, *, signed: bool) -> Float32:
    """The numbers (n,) that `codes` represent: the map's value times the block's scale, in fp32."""
    return values(signed=signed)[codes] * np.repeat(scales, BLOCK)[: codes.size]


def random_bits(key: tuple[int, int], elements: int) -> Uint32:
    """The 16 random bits of each element, (n,)."""
    counters = np.arange(-(-elements // RANDOM_BLOCK) * LANES, dtype=np.uint32)
    pair = np.array([key[0]], np.uint32), np.array([key[1]], np.uint32)
    words = threefry(pair, (counters, np.zeros_like(counters)))
    low, high = np.uint32(0xFFFF), np.uint32(16)
    planes = [part.reshape(-1, LANES) for w in words for part in (w & low, w >> high)]
    return np.stack(planes, axis=1).reshape(-1)[:elements]


def rounded(array: NDArray[np.float32], bits: Uint32) -> NDArray[np.float32]:
    """Round finite `array` to bfloat16 with its random bits; the result is still float32."""
    return ((array.view(np.uint32) + bits) & np.uint32(0xFFFF0000)).view(np.float32)
