"""Arrays in memory of their own, outside the heap of the C library.

A step on a CPU takes the same blocks from the heap each time. If another thread meanwhile allocates an array inside a
freed block, the next step must take another block, which the heap then keeps. An array in its own mapping leaves these
blocks whole, and its memory goes back to the system when the array is freed.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of zeros that begins at a page of its own."""
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if not count:
        return np.empty(shape, kind)
    pages = mmap.mmap(-1, count * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, kind, count).reshape(shape)
