"""A family of linear systems: one physical plant whose parameters vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Parameters = Mapping[str, float]
Dynamics = tuple[Matrix, Matrix]
"""A (n, n) and B (n, m) of dx/dt = A x + B u."""


@dataclass(frozen=True)
class Family:
    """One plant. All quantities are in SI units, and x is the deviation from an operating point."""

    name: str
    field: str
    """mechanics | electronics | vehicles | aerospace | robotics"""
    parameters: Parameters
    """Nominal values. A variant multiplies each by a factor of its own."""
    dynamics: Callable[[Parameters], Dynamics]
    states: tuple[float, ...]
    """Typical largest value of each state: trajectories begin within it, and errors are weighed by
    it."""
    controls: tuple[float, ...]
    """Typical largest value of each control."""

    def cost(self) -> tuple[Matrix, Matrix]:
        """Q (n, n) and R (m, m) by Bryson's rule: one over the square of the largest value (Bryson
        & Ho 1975, section 5.2)."""
        return (
            np.diag(1 / np.square(np.array(self.states))),
            np.diag(1 / np.square(np.array(self.controls))),
        )


def second_order(mass: Any, damping: Any, stiffness: Any, inputs: Any) -> Dynamics:
    """State form of M q'' + D q' + S q = F u, with x = (q, q')."""
    m, d, s, f = (
        np.asarray(value, dtype=np.float64) for value in (mass, damping, stiffness, inputs)
    )
    n = len(m)
    a, b = np.zeros((2 * n, 2 * n)), np.zeros((2 * n, f.shape[1]))
    a[:n, n:] = np.eye(n)
    a[n:, :n], a[n:, n:] = -np.linalg.solve(m, s), -np.linalg.solve(m, d)
    b[n:] = np.linalg.solve(m, f)
    return a, b


def state_space(a: Any, b: Any) -> Dynamics:
    """A and B given as rows."""
    return np.array(a, dtype=np.float64), np.array(b, dtype=np.float64)
