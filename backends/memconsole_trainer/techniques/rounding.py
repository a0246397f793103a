"""Weights kept in bfloat16 alone (`optimize.precision = bf16-sr`): the one specification both backends follow.

- Matrices, embeddings and positions are stored in bf16, without a copy in fp32; norms and biases in fp32.
- Gradients come in bf16; over several micro-batches they are summed in fp32.
- A step widens weight and gradient to fp32, updates, and rounds back to one of the two nearest bf16 values, the
  upper with the probability of the share it is nearer to. Rounding to nearest would lose every update below
  2^-9 of the weight (Gupta et al. 2015, §3; Zamirai et al. 2021): here updates are right on average.
- For a finite x: bits of x as uint32, plus 16 random bits, without the lower 16.
- The random bits come from Threefry-2x32, a counter-based generator, with 13 rounds, the fewest its authors
  found to pass BigCrush (Salmon et al. 2011): they depend on the seed, the step and the weight alone. Nothing is
  kept between steps, so that a resumed run rounds as the uninterrupted one.

Key of a tensor: threefry((seed's lower, upper 32 bits), (step, index of the weight in `parameters`)). Element i has
the words x0, x1 of counter (256 (i div 1024) + i mod 256, 0), and of these, for (i div 256) mod 4 = 0 … 3: the
lower half of x0, its upper half, the lower half of x1, its upper half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.model import Parameter
from memconsole.plan.plan import Plan

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24, 13, 15, 26, 6, 17)
"""Of one round each; the first eight come again."""
INJECTED = 4
"""Rounds after which a key is added, each time the next two of three."""
PARITY = 0x1BD11BDA
"""What makes the third key of two."""
BLOCK = 1024
LANES = 256
"""Counters of a block."""

Uint32 = NDArray[np.uint32]


def is_rounded(plan: Plan, parameter: Parameter) -> bool:
    """Whether a trained weight is stored in bf16."""
    return plan.optimize.precision == "bf16-sr" and parameter.role not in ("norm", "bias")


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two words of 32 random bits for each counter: uint32 arrays of NumPy or JAX, of any shape."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for done, distance in enumerate(ROTATIONS, start=1):
        x = x + y
        y = (y << np.uint32(distance)) | (y >> np.uint32(32 - distance))
        y = y ^ x
        if done % INJECTED == 0:
            group = done // INJECTED
            x = x + keys[group % 3]
            y = y + keys[(group + 1) % 3] + np.uint32(group)
    return x, y


def tensor_key(seed: int, step: int, index: int) -> tuple[int, int]:
    """The key of the weight at `index` at a step."""
    words = (np.array([n], np.uint32) for n in (seed % 2**32, seed >> 32 & 0xFFFFFFFF, step, index))
    low, high, at, which = words
    x, y = threefry((low, high), (at, which))
    return int(x[0]), int(y[0])


def random_bits(key: tuple[int, int], elements: int) -> Uint32:
    """The 16 random bits of each element (n,)."""
    counters = np.arange(-(-elements // BLOCK) * LANES, dtype=np.uint32)
    pair = np.array([key[0]], np.uint32), np.array([key[1]], np.uint32)
    words = threefry(pair, (counters, np.zeros_like(counters)))
    low, high = np.uint32(0xFFFF), np.uint32(16)
    planes = [part.reshape(-1, LANES) for w in words for part in (w & low, w >> high)]
    return np.stack(planes, axis=1).reshape(-1)[:elements]


def rounded(array: NDArray[np.float32], bits: Uint32) -> NDArray[np.float32]:
    """Finite `array` rounded to bfloat16 by its random bits, still in float32."""
    return ((array.view(np.uint32) + bits) & np.uint32(0xFFFF0000)).view(np.float32)
