"""Which rows stand for all: those at even distances, because neighbours are alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def evaluated_rows(count: int, micro_batch: int, limit: int) -> Iterator[NDArray[np.intp]]:
    """Yield the numbers of the rows of each evaluation batch: `micro_batch` of them, fewer in the last one. They
    are all of `count` rows, or as many as fill `limit` batches if it is not 0, at even distances."""
    rows = evaluated(count, micro_batch, limit)
    for start in range(0, len(rows), micro_batch):
        yield rows[start : start + micro_batch]


def evaluated(count: int, micro_batch: int, limit: int) -> NDArray[np.intp]:
    """The numbers of the rows of all these batches, rising."""
    return even_rows(count, limit * micro_batch if limit else count)


def even_rows(count: int, most: int) -> NDArray[np.intp]:
    """The rising numbers of `count` rows, or of `most` of them at even distances."""
    wanted = min(count, most)
    return np.arange(wanted) * count // max(wanted, 1)


def spread_order(count: int) -> NDArray[np.intp]:
    """0 to `count` - 1, beginning with 0, in an order whose first ones, however many, are about evenly spread: the
    ranks of the additive recurrence of the golden ratio (Kuipers and Niederreiter, Uniform Distribution of
    Sequences)."""
    golden = (math.sqrt(5) - 1) / 2
    return np.argsort(np.argsort(np.arange(count) * golden % 1))
