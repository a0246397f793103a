"""Block-wise 8-bit storage of optimizer moments: the specification of both backends.

After Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861):

- A tensor, flattened, is cut into blocks of 256 elements; the last block may be shorter. Each block
  has one fp32 scale, its largest magnitude (§2.1).
- An element times the reciprocal of its block's scale, both fp32, becomes the nearest of the 256
  values of the dynamic map (§1.3), which is signed for the first moment and unsigned for the second
  (§2.2).
- The nearest value is looked up by the element's upper 16 bits, that is by `bfloat16` rounded half
  away from zero. This is precise enough for a map whose finest steps are 0.7 %, and needs a table
  of only 64 KiB.
- A positive second moment never becomes 0: below half of the smallest value it becomes the
  smallest. Zero would make the update m / (sqrt(v) + eps) explode. (Devices that flush subnormal
  numbers turn a scale or a scaled element below 2^-126 into zero, but the root of such a v is far
  below any eps.)
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import STORED_MATRICES, TABLES, Parameter

BLOCK = 256
"""Elements that share a scale."""
SMALLEST = 4096
"""Smaller tensors keep fp32 moments, which cost little and are exact."""
DECADES = 7
HALF = 0x8000
"""Added to the bits of an fp32 number to round its upper 16 bits."""
OFFSET = 0x8000
"""Row of +0 in the lookup table; the rows before it are the negative numbers."""

UInt8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]


def is_quantized(optimizer: str, parameter: Parameter) -> bool:
    """Whether a weight's moments are stored in 8 bits: those of large matrices inside the blocks
    are, and with `adamw8-all` also those of the embedding, positions and head.

    Otherwise these keep 32 bits, because 8-bit embeddings train unstably (§2.3). Norms and biases
    always do.
    """
    tables = TABLES if optimizer == "adamw8-all" else ()
    return parameter.role in (*STORED_MATRICES, *tables) and parameter.size >= SMALLEST


def scales_of(size: int) -> int:
    """Number of blocks, hence scales, of a tensor of `size` elements."""
    return -(-size // BLOCK)


@functools.cache
def values(*, signed: bool) -> Float32:
    """The dynamic map, ascending (256,).

    Leading zero bits count decades below 1. The bits after the first one bit divide the decade
    [0.1, 1) evenly, and a value is the middle of its interval: decade d = 0 … 6 has 2^d intervals,
    scaled by 10^(d-6). The unsigned map has one more bit, so twice as many intervals. The map also
    contains exactly 0 and 1.
    """
    magnitudes: list[float] = []
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        magnitudes.extend(middles * 10.0 ** (decade - DECADES + 1))
    negative = [-x for x in magnitudes] if signed else []
    return np.sort(np.array([*negative, 0.0, *magnitudes, 1.0], dtype=np.float32))


@functools.cache
def lookup(*, signed: bool) -> UInt8:
    """Table of codes (65536,), indexed by the upper 16 bits of an fp32 number as a signed integer
    plus `OFFSET`.

    The row is ``((bits + HALF) >> 16) + OFFSET`` in signed 32-bit arithmetic. A tie goes to the
    lower value.
    """
    found = values(signed=signed)
    rows = np.arange(-OFFSET, OFFSET, dtype=np.int32)
    with np.errstate(invalid="ignore"):  # some patterns are signaling NaNs
        numbers = np.nan_to_num((rows << 16).view(np.float32).astype(np.float64))
    middles = (found[:-1].astype(np.float64) + found[1:]) / 2
    codes = np.searchsorted(middles, numbers).astype(np.uint8)
    if not signed:
        codes[(numbers > 0) & (codes == 0)] = 1
    return codes
