"""Mean, deviation and range of columns of numbers, such as the features and outputs of windows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

CONSTANT = 1e-7
"""Numbers whose deviation is a smaller share of their mean do not vary: float32 holds no smaller one."""


class Statistics(NamedTuple):
    """Of each column, arrays (columns,). The deviation is that of all numbers (divided by n); 0 for a column that is
    constant or was never counted."""

    count: Any
    """How many numbers count."""
    mean: Any
    deviation: Any
    least: Any
    most: Any


class WindowStatistics(NamedTuple):
    """Of each feature over all steps of the windows, and of each output where the mask counts it."""

    features: Statistics
    outputs: Statistics


class Moments:
    """Mean and squared deviations of columns, block by block (Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise
    algorithm for computing sample variances")."""

    def __init__(self, columns: int) -> None:
        self._count, self._mean, self._squares = (np.zeros(columns) for _ in range(3))
        self._least, self._most = np.full(columns, np.inf), np.full(columns, -np.inf)

    def add(self, values: Any, mask: Any = None) -> None:
        """Add rows (n, columns). `mask` (n, columns) says how much each number counts."""
        weights = np.ones_like(values) if mask is None else mask
        count = weights.sum(0, dtype=np.float64)
        mean = np.einsum("nc,nc->c", weights, values, dtype=np.float64) / np.maximum(count, 1e-300)
        missed = values - mean.astype(np.float32)
        squares = np.einsum("nc,nc,nc->c", weights, missed, missed, dtype=np.float64)
        total = np.maximum(self._count + count, 1e-300)
        apart = mean - self._mean
        self._squares += squares + apart**2 * (self._count * count / total)
        self._mean += apart * (count / total)
        self._count += count
        counted = weights > 0
        np.minimum(self._least, np.min(values, 0, where=counted, initial=np.inf), out=self._least)
        np.maximum(self._most, np.max(values, 0, where=counted, initial=-np.inf), out=self._most)

    @property
    def statistics(self) -> Statistics:
        deviation = np.sqrt(self._squares / np.maximum(self._count, 1e-300))
        deviation[deviation <= CONSTANT * np.abs(self._mean)] = 0.0
        least, most = (np.where(self._count > 0, a, 0.0) for a in (self._least, self._most))
        return Statistics(self._count, self._mean, deviation, least, most)
