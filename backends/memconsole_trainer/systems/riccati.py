"""Optimal control of sampled linear systems: Runge-Kutta steps, and the gain of least cost.

Everything works on stacks of systems: matrices are (..., n, n).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memconsole_trainer.systems.family import Matrix

DOUBLINGS = 60
"""Most doublings; each squares the remaining error."""
TOLERANCE = 1e-12


def runge_kutta(a: Matrix, b: Matrix, seconds: float) -> tuple[Matrix, Matrix]:
    """The step of the classical fourth-order Runge-Kutta method with the control held:
    x' = F x + G u.

    For a linear system its four stages add up to these polynomials of A, so that one product takes
    the place of the stages.
    """
    h = a * seconds
    eye = np.eye(a.shape[-1])
    second, third = h @ h / 2, h @ h @ h / 6
    step = eye + h + second + third + h @ third / 4
    held = (eye + h / 2 + second / 3 + third / 4) * seconds
    return step, held @ b


def gain(step: Matrix, held: Matrix, q: Matrix, r: Matrix) -> Matrix:
    """K (..., m, n) of the control u = -K x with the least sum of x'Qx + u'Ru over all steps.

    Solves the discrete Riccati equation by doubling (Chu, Fan, Lin & Wang 2004, algorithm SDA).
    Raises `ValueError` if no control makes a system stable.
    """
    p = solution(step, held, q, r)
    turned = _transposed(held)
    found: Any = np.linalg.solve(r + turned @ p @ held, turned @ p @ step)
    return np.asarray(found, np.float64)


def solution(step: Matrix, held: Matrix, q: Matrix, r: Matrix) -> Matrix:
    """P (..., n, n) of the Riccati equation: x'Px is the least cost from x on."""
    a = step
    g = held @ np.linalg.solve(
        np.broadcast_to(r, (*held.shape[:-2], *r.shape[-2:])), _transposed(held)
    )
    h = np.broadcast_to(q, a.shape)
    eye = np.eye(a.shape[-1])
    for _ in range(DOUBLINGS):
        # Without a solution the matrices grow until they overflow.
        with np.errstate(over="ignore", invalid="ignore"):
            forward = np.linalg.solve(eye + g @ h, a)
            next_h = h + _transposed(a) @ h @ forward
            g = g + a @ np.linalg.solve(eye + g @ h, g) @ _transposed(a)
            a = a @ forward
            change = np.abs(next_h - h).max() / np.abs(next_h).max()
            h = (next_h + _transposed(next_h)) / 2
        if not np.isfinite(change):
            break
        if change < TOLERANCE:
            return h
    raise ValueError("the Riccati equation has no solution: a system cannot be made stable")


def _transposed(matrix: Matrix) -> Matrix:
    return np.swapaxes(matrix, -1, -2)
