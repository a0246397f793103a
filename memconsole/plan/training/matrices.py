"""How many matrices of one weight an optimizer updates at a time, if its rule looks at whole matrices."""

from __future__ import annotations

TOGETHER = 2**22
"""The most elements of small matrices that are updated at a time. A larger matrix is updated alone."""


def together(count: int, size: int) -> int:
    """How many of `count` matrices of `size` elements are updated at a time: a divisor of `count`."""
    most = max(1, min(count, TOGETHER // size))
    return next(n for n in range(most, 0, -1) if count % n == 0)
