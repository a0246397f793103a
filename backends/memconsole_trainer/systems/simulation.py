"""Simulates controlled systems step by step, and sums what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memconsole_trainer.systems.family import Matrix


class Trajectories(NamedTuple):
    """T trajectories: states (T, steps, n), and the controls (T, steps, m) given at each."""

    states: Matrix
    controls: Matrix


Policy = Callable[[Matrix], Matrix]
"""States (T, n) to controls (T, m)."""


def simulate(
    step: Matrix, held: Matrix, starts: Matrix, noise: Matrix, policy: Policy
) -> Trajectories:
    """Simulate T systems from `starts` (T, n) with the matrices F and G of their steps (see `runge_kutta`):
    x' = F x + G u + noise, for each step of `noise` (T, steps, n)."""
    x = starts
    states, controls = [], []
    for t in range(noise.shape[1]):
        u = policy(x)
        states.append(x)
        controls.append(u)
        x = applied(step, x) + applied(held, u) + noise[:, t]
    return Trajectories(np.stack(states, 1), np.stack(controls, 1))


def optimal(k: Matrix) -> Policy:
    """The policy u = -K x of gains (T, m, n)."""
    return lambda x: -applied(k, x)


def cost(trajectories: Trajectories, q: Matrix, r: Matrix) -> Matrix:
    """The sum of x'Qx + u'Ru over the steps of each trajectory, (T,). Q and R may be stacks."""
    x, u = trajectories
    found: Matrix = ((x @ q) * x).sum((1, 2)) + ((u @ r) * u).sum((1, 2))
    return found


def applied(matrix: Matrix, vector: Matrix) -> Matrix:
    """(T, i, j) times (T, j), row by row."""
    found: Matrix = (matrix @ vector[..., None])[..., 0]
    return found
