"""Simulates controlled systems step by step, and sums what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memconsole_trainer.systems.family import Matrix
from memconsole_trainer.systems.riccati import runge_kutta
from memconsole_trainer.systems.variants import Variants


class Trajectories(NamedTuple):
    """T trajectories: states (T, steps, n), and the controls (T, steps, m) given at each."""

    states: Matrix
    controls: Matrix


Policy = Callable[[Matrix], Matrix]
"""States (T, n) to controls (T, m)."""


def simulate(
    variants: Variants,
    chosen: np.ndarray,
    starts: Matrix,
    noise: Matrix,
    policy: Policy | None = None,
) -> Trajectories:
    """Trajectories of the `chosen` variants (T,) from `starts` (T, n). After each step, `noise`
    (T, steps, n) is added to the states. Without a `policy` the optimal gains control."""
    step, held = runge_kutta(variants.a, variants.b, variants.seconds)
    step, held, k = step[chosen], held[chosen], variants.k[chosen]
    x = starts
    states = np.empty(noise.shape)
    controls = np.empty((*noise.shape[:2], variants.n_controls))
    for t in range(noise.shape[1]):
        u = -applied(k, x) if policy is None else policy(x)
        states[:, t], controls[:, t] = x, u
        x = applied(step, x) + applied(held, u) + noise[:, t]
    return Trajectories(states, controls)


def cost(trajectories: Trajectories, q: Matrix, r: Matrix) -> Matrix:
    """The sum of x'Qx + u'Ru over the steps of each trajectory, (T,)."""
    x, u = trajectories
    return np.einsum("tsi,ij,tsj->t", x, q, x) + np.einsum("tsi,ij,tsj->t", u, r, u)


def applied(matrix: Matrix, vector: Matrix) -> Matrix:
    """(T, i, j) times (T, j), row by row."""
    found: Matrix = (matrix @ vector[..., None])[..., 0]
    return found
