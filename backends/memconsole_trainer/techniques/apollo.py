"""APOLLO-Mini (Zhu et al. 2024, arXiv:2412.05270, §4): the specification of both backends.

AdamW's moments are kept of a projection of each matrix to rank 1, and give one factor for the whole gradient. This is the
rule of the blocks' matrices; each expert's matrix counts as a matrix of its own. All other weights, and adapters, use
AdamW. For a matrix with gradient g (fp32), whose shorter side has m entries (square: its columns):

    s = m random signs, others after every PERIOD updates
    r = g s, or sᵀ g for a matrix with more columns than rows
    a = the update that AdamW would make of the gradient r
    u = √m |a| / (|r| + EPSILON) g
    u = u min(1, GROWTH n / |u|), with n = |u| of the update before; the first one is not limited
    update = u

√m gives u the size of AdamW's update (a projection of rank 1 makes the factor √m too small, §4.1), so that one learning
rate suits both. The authors' own code has √128 for every m, and numbers of a normal distribution for s. The limit of growth
is that of Fira (Chen et al. 2024, arXiv:2410.01623, eq. 7).

The signs depend on the plan's seed, the number of updates and the place on the side, so that nothing is kept of them
and both backends draw the same. All matrices have the same signs at the same places.
"""

from __future__ import annotations

from typing import Any

from memconsole.plan.models.model import STORED_MATRICES, Parameter

PERIOD = 200
EPSILON = 1e-8
GROWTH = 1.01


def is_projected(parameter: Parameter) -> bool:
    """Whether APOLLO-Mini's own rule updates this weight: the matrices of the blocks."""
    return parameter.role in STORED_MATRICES


def is_tall(shape: tuple[int, ...]) -> bool:
    """Whether the columns of a matrix (..., rows, columns) are projected: it has at least as many rows."""
    return shape[-2] >= shape[-1]


def hashed(x: Any, low: Any) -> Any:
    """32 random bits for each integer of x, an array of any framework. `low` keeps the lower 32 bits of a product.

    The function of two rounds with the least bias that Wellons (2018, github.com/skeeto/hash-prospector) found.
    """
    x = low((x ^ (x >> 16)) * 0x21F0AAAD)
    x = low((x ^ (x >> 15)) * 0x735A2D97)
    return x ^ (x >> 15)


def start_of(seed: int) -> int:
    """31 bits of the plan's seed, from which the random bits begin."""
    return (seed ^ seed >> 31) % 2**31
