"""Weights kept only in bfloat16 (`optimize.precision = bf16-sr`): the specification of both
backends.

- Matrices, embeddings and positions are stored in bf16 without an fp32 copy; norms and biases in
  fp32.
- Gradients are bf16. Over several micro-batches they are summed in fp32.
- A step widens weight and gradient to fp32, updates, and rounds to one of the two neighbouring bf16
  values. The closer a neighbour is, the more likely it is chosen, so updates are right on average.
  Rounding to nearest would lose every update below 2^-9 of the weight (Gupta et al. 2015, §3;
  Zamirai et al. 2021).
- For a finite x: add 16 random bits to the bits of x as uint32, then clear the lower 16 bits.
- The random bits come from Threefry-2x32, a counter-based generator, with 13 rounds, the fewest its
  authors found to pass BigCrush (Salmon et al. 2011). They depend only on the seed, the step and
  the weight. No random state is kept between steps, so a resumed run rounds like an uninterrupted
  one.

Key of a tensor: threefry((seed's lower, upper 32 bits), (step, index of the weight in
`parameters`)). Element i uses the words x0, x1 of counter (256 (i div 1024) + i mod 256, 0). For (i
div 256) mod 4 = 0 … 3 its bits are: the lower half of x0, the upper half of x0, the lower half of
x1, the upper half of x1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memconsole.plan.models.model import Parameter
from memconsole.plan.plan import Plan

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24, 13, 15, 26, 6, 17)
"""Rotation distance of each round; the eight distances repeat."""
INJECTED = 4
"""A key is added after every this many rounds: each time the next two of the three key words."""
PARITY = 0x1BD11BDA
"""Constant that gives the third key word from the first two."""
BLOCK = 1024
LANES = 256
"""Counters per block of `BLOCK` elements."""


def is_rounded(plan: Plan, parameter: Parameter) -> bool:
    """Whether a trained weight is stored in bf16."""
    return plan.optimize.precision == "bf16-sr" and parameter.role not in ("norm", "bias")


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two words of 32 random bits per counter. Works on uint32 arrays of NumPy or JAX, of any
    shape."""
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


def three_keys(key: tuple[int, int]) -> tuple[int, int, int]:
    """Threefry's key words: the two of `key`, and their parity."""
    return (*key, key[0] ^ key[1] ^ PARITY)


def signed(word: int) -> int:
    """The int32 of the same lower 32 bits."""
    return (word + 2**31) % 2**32 - 2**31


def tensor_key(seed: int, step: int, index: int) -> tuple[int, int]:
    """The key of the weight at `index` for one step."""
    words = (np.array([n], np.uint32) for n in (seed % 2**32, seed >> 32 & 0xFFFFFFFF, step, index))
    low, high, at, which = words
    x, y = threefry((low, high), (at, which))
    return int(x[0]), int(y[0])
