"""Closed-loop trials: the cost of a model's control, relative to the optimal control.

The systems of a window file are simulated under a policy that has the same inputs as the model. The optimal
control runs each trial until a first window is full. Then the policy takes over, and costs are
compared from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from memconsole_trainer.data.spread import spread_order
from memconsole_trainer.data.windows.systems import StoredFamily
from memconsole_trainer.randomness import generator
from memconsole_trainer.systems.family import Matrix
from memconsole_trainer.systems.features import MOST_CONTROLS, MOST_STATES, code
from memconsole_trainer.systems.riccati import solution
from memconsole_trainer.systems.simulation import (
    Trajectories,
    applied,
    cost,
    optimal,
    simulate,
)

STEPS = 96
"""Steps under the policy."""
SYSTEMS = 24
"""Systems of a group of families that are simulated at an evaluation; one of each family if there are more
families."""
RUNAWAY = 1000.0
"""The cost ratio of a policy that loses control, and the highest that is reported."""
_BOUND = 1e3
"""A state this many times its typical largest value counts as out of control."""

WindowPolicy = Callable[[Any], Any]
"""Normalized windows (S, length, features) float32 to normalized controls (S, outputs)."""


def chosen(variants: Sequence[int]) -> list[tuple[int, int]]:
    """(family, variant) of each system that is simulated, given the number of variants of each family: `SYSTEMS`
    if there are as many, and at least one of each family. Families and variants are spread over the file."""
    order = spread_order(len(variants)).tolist()
    found = []
    for i in range(min(max(SYSTEMS, len(variants)), sum(variants))):
        family, taken = order[i % len(variants)], i // len(variants)
        count = variants[family]
        found.append((family, int(spread_order(count)[(family + taken) % count])))
    return found


class Trials:
    """S systems with a start and a noise of their own, the same at every evaluation."""

    def __init__(self, families: Iterable[StoredFamily], length: int, noise: float) -> None:
        """Simulates some systems of the families, as `chosen` says. `noise` is that of a step as a share of
        the states' range."""
        self._length = length
        found = list(families)
        self.systems = chosen([family.variants.count for family in found])
        """For each system the index of its family and that of its variant."""
        systems = [(found[place], variant) for place, variant in self.systems]
        count, n, m = len(systems), MOST_STATES, MOST_CONTROLS
        self._step, self._held = np.zeros((count, n, n)), np.zeros((count, n, m))
        self._k, self._q = np.zeros((count, m, n)), np.zeros((count, n, n))
        self._r, self._codes = np.zeros((count, m, m)), np.zeros((count, len(code(0, 0))))
        self._state_max, self._control_max = np.ones((count, n)), np.ones((count, m))
        self._starts, self._bound = np.zeros((count, n)), np.zeros((count, n))
        self._rest = np.zeros((count, n, n))
        self._noise = np.zeros((count, length + STEPS, n))
        for i, (family, variant) in enumerate(systems):
            v = family.variants
            x, u = v.n_states, v.n_controls
            step, held = v.steps()
            self._step[i, :x, :x], self._held[i, :x, :u] = step[variant], held[variant]
            self._rest[i, :x, :x] = solution(step[variant], held[variant], v.q, v.r)
            self._k[i, :u, :x], self._q[i, :x, :x], self._r[i, :u, :u] = v.k[variant], v.q, v.r
            self._state_max[i, :x], self._control_max[i, :u] = family.state_max, family.control_max
            self._codes[i] = code(x, u)
            random = generator(i, f"trials/{v.family}")
            self._starts[i, :x] = random.uniform(-1, 1, x) * v.states
            self._noise[i, :, :x] = (
                random.standard_normal((len(self._noise[i]), x)) * noise * v.states
            )
            self._bound[i, :x] = _BOUND * v.states
        self._optimal = self._cost(optimal(self._k))

    @property
    def count(self) -> int:
        return len(self._starts)

    def ratios(self, policy: WindowPolicy) -> Matrix:
        """The cost of each system under `policy`, divided by that of the optimal control, (S,)."""
        windows = np.zeros(
            (self.count, self._length, MOST_STATES + self._codes.shape[1]), np.float32
        )
        windows[:, :, MOST_STATES:] = self._codes[:, None]
        lost = np.zeros(self.count, bool)
        step = 0

        def control(x: Matrix) -> Matrix:
            nonlocal step
            lost[(np.abs(x) > self._bound).any(1)] = True
            windows[:, :-1] = windows[:, 1:]
            windows[:, -1, :MOST_STATES] = x / self._state_max
            step += 1
            if step < self._length:
                return optimal(self._k)(x)
            windows[lost, :, :MOST_STATES] = (
                0  # systems that are out of control are not simulated further
            )
            found = policy(windows) * self._control_max
            known = np.arange(MOST_CONTROLS) < np.abs(self._held).any(1).sum(1)[:, None]
            return np.where(known & ~lost[:, None], found, 0.0)

        with np.errstate(over="ignore", invalid="ignore"):
            ratios = self._cost(control) / self._optimal
        return np.where(lost | ~(ratios < RUNAWAY), RUNAWAY, ratios)

    def _cost(self, policy: Any) -> Matrix:
        """The cost of the steps from the first full window on, plus the optimal cost-to-go of the last state, so
        that no policy gains by leaving a large state at the end."""
        found = simulate(self._step, self._held, self._starts, self._noise, policy)
        first, end = self._length - 1, found.states[:, -1]
        counted = Trajectories(found.states[:, first:-1], found.controls[:, first:-1])
        rest: Matrix = (applied(self._rest, end) * end).sum(1)
        return cost(counted, self._q, self._r) + rest
