"""Whether a jump is kept: on rows that were not used to choose it, the loss must fall significantly."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

GROUPS = 8
"""Groups of rows whose losses are compared. Each is one forward pass of fewer rows."""
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Quantiles of Student's t for one to seven degrees of freedom, which a decrease by chance exceeds in one of 40 cases."""


def rows_of_group(rows: int, micro_batches: int) -> int:
    """Number of rows in a group of a micro-batch, so that all micro-batches together have about `GROUPS` groups."""
    return -(-rows // max(1, min(rows, GROUPS // micro_batches)))


def is_confirmed(
    before: NDArray[np.float64], after: NDArray[np.float64], promised: float
) -> tuple[float, bool]:
    """The decrease of the summed losses of groups of rows, and whether it is significant given the spread of the groups.
    A single group has no spread; its decrease must be at least half of `promised`."""
    if not np.isfinite([before, after]).all():
        return 0.0, False
    falls = before - after
    total, count = float(falls.sum()), len(falls)
    if count == 1:
        return total, total > 0 and total >= promised / 2
    error = float(falls.std(ddof=1)) * math.sqrt(count)
    return total, total > QUANTILES[min(count, len(QUANTILES) + 1) - 2] * error
