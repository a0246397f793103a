"""Variants of a family: parameters drawn around the nominal ones, each with its optimal gain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memconsole_trainer.randomness import generator
from memconsole_trainer.systems.family import Family, Matrix
from memconsole_trainer.systems.riccati import gain, runge_kutta

ANGLE = 0.1
"""A sample period is this divided by the fastest rate of the controlled nominal system, so that
steps follow every motion."""
ROUNDS = 3
"""Design rounds of the sample period; the rates settle quickly."""


@dataclass(frozen=True)
class Variants:
    """Systems of one family, stacked: V variants of n states and m controls."""

    family: str
    field: str
    seconds: float
    """The sample period."""
    a: Matrix
    """(V, n, n)"""
    b: Matrix
    """(V, n, m)"""
    q: Matrix
    """(n, n)"""
    r: Matrix
    """(m, m)"""
    k: Matrix
    """(V, m, n): u = -K x has the least cost."""
    states: Matrix
    """(n,): trajectories begin within plus and minus this."""

    def steps(self) -> tuple[Matrix, Matrix]:
        """F (V, n, n) and G (V, n, m) of a sample period, x' = F x + G u."""
        return runge_kutta(self.a, self.b, self.seconds)

    @property
    def count(self) -> int:
        return len(self.a)

    @property
    def n_states(self) -> int:
        return int(self.b.shape[1])

    @property
    def n_controls(self) -> int:
        return int(self.b.shape[2])


def draw(family: Family, count: int, uncertainty: float, seed: int) -> Variants:
    """`count` variants whose parameters differ from the nominal ones by up to `uncertainty`, a
    share. The gain is designed for each variant."""
    q, r = family.cost()
    factors = generator(seed, f"lqr/variants/{family.name}").uniform(
        1 - uncertainty, 1 + uncertainty, (count, len(family.parameters))
    )
    nominal = np.array(list(family.parameters.values()))
    systems = [
        family.dynamics(dict(zip(family.parameters, map(float, row), strict=True)))
        for row in factors * nominal
    ]
    a, b = (np.stack(matrices) for matrices in zip(*systems, strict=True))
    seconds = sample_period(family)
    return Variants(
        family.name, family.field, seconds, a, b, q, r,
        gain(*runge_kutta(a, b, seconds), q, r), np.array(family.states),
    )  # fmt: skip


def sample_period(family: Family) -> float:
    """Seconds of a step: `ANGLE` radians of the fastest motion of the controlled nominal system."""
    a, b = family.dynamics(family.parameters)
    q, r = family.cost()
    rate = float(np.abs(np.linalg.eigvals(a)).max())
    for _ in range(ROUNDS):
        seconds = ANGLE / rate
        k = gain(*runge_kutta(a, b, seconds), q, r)
        rate = max(rate, float(np.abs(np.linalg.eigvals(a - b @ k)).max()))
    return ANGLE / rate
