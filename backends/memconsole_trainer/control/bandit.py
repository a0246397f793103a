"""Chooses how far to jump: a contextual bandit over horizons (LinUCB, Li et al. 2010, algorithm 1).

Each horizon has a linear model of its reward. The horizon with the largest upper confidence bound
is chosen. After a jump that is rolled back, only shorter horizons are allowed; after an accepted
one, longer ones again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
SHARES = (0.125, 0.25, 0.5, 1.0)
"""The horizons, as shares of the longest one."""
EXPLORATION = 0.5
"""Weight of the uncertainty in the upper bound (α)."""


class Bandit:
    """Horizons up to `longest` gradient steps, for contexts of `features` numbers."""

    def __init__(self, longest: int, features: int) -> None:
        self.horizons = sorted({max(1, round(longest * share)) for share in SHARES})
        self.allowed = len(self.horizons)
        """How many of the horizons are allowed, the shortest first."""
        self._a = np.stack([np.eye(features)] * len(self.horizons))
        self._b = np.zeros((len(self.horizons), features))

    def choose(self, context: Vector) -> int:
        """The horizon to use now; the shortest of equally good ones."""
        bounds = [self.bound(i, context) for i in range(self.allowed)]
        return self.horizons[int(np.argmax(bounds))]

    def bound(self, number: int, context: Vector) -> float:
        """The upper confidence bound of a horizon's reward: θᵀx + α √(xᵀA⁻¹x), θ = A⁻¹b."""
        solved = np.linalg.solve(self._a[number], np.stack([self._b[number], context], axis=1))
        return float(solved[:, 0] @ context + EXPLORATION * np.sqrt(context @ solved[:, 1]))

    def learn(self, horizon: int, context: Vector, reward: float, accepted: bool) -> None:
        """Count a jump."""
        number = self.horizons.index(horizon)
        self._a[number] += np.outer(context, context)
        self._b[number] += reward * context
        more = self.allowed + 1 if accepted else number
        self.allowed = min(max(more, 1), len(self.horizons))

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {"allowed": self.allowed, "a": self._a.tolist(), "b": self._b.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.allowed = state["allowed"]
        self._a, self._b = np.array(state["a"]), np.array(state["b"])
