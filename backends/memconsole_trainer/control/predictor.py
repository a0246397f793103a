"""Predicts the next movements of weights from the inner products of their recent movements.

A movement d is the change of a group of weights between two snapshots. Every prediction is a linear
combination of the known movements, so a predictor needs only their inner products and returns
coefficients ("shares"). The backend forms the sum. Movements are numbered from the oldest to the newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.sections.hybrid import Predictor as Kind

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
LAGS = 3
"""Number of movements from which the nowcaster computes the next one."""
DECAY = 0.8
"""Factor of what the nowcaster has learned when an observation is added."""
RIDGE = 2e-3
"""Ridge penalty of the nowcaster, as a share of the mean square of its inputs."""
RANK = 4
"""Most dynamic modes."""
LEAST_SINGULAR = 1e-3
"""Directions whose singular value is a smaller share of the largest one are left out."""


class Predictor(Protocol):
    """Predicts the movements of one or more groups of weights."""

    def learn(self, products: Mapping[str, Matrix]) -> None:
        """Learn from the inner products (n, n) of consecutive movements, by group."""
        ...

    def shares(self, products: Mapping[str, Matrix], movements: float) -> dict[str, Vector]:
        """The predicted sum of the next `movements` movements: the share (n,) of each known one,
        by group."""
        ...

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...


def predictor(kind: Kind) -> Predictor:
    """The predictor of `hybrid.predictor`."""
    kinds: dict[Kind, type[Predictor]] = {
        "extrapolate": Extrapolation,
        "dmd": DynamicModes,
        "nowcast": Nowcaster,
    }
    return kinds[kind]()


class _Stateless:
    """A predictor that learns nothing."""

    def learn(self, products: Mapping[str, Matrix]) -> None:
        """There is nothing to learn."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """There is nothing to load."""


class Extrapolation(_Stateless):
    """Predicts that the mean of the known movements continues."""

    def shares(self, products: Mapping[str, Matrix], movements: float) -> dict[str, Vector]:
        return {g: np.full(len(p), movements / len(p)) for g, p in products.items()}


class DynamicModes(_Stateless):
    """Dynamic mode decomposition of the movements (Schmid 2010; Tu et al. 2014, algorithm 1).

    X is all movements without the last one, and Y all without the first. The operator that leads from X to Y
    is projected on the leading left singular vectors of X. Everything follows from inner products:
    XᵀX gives singular values and right vectors. Modes that grow are held constant.
    """

    def shares(self, products: Mapping[str, Matrix], movements: float) -> dict[str, Vector]:
        return {g: _modes(p, movements) for g, p in products.items()}


def _modes(product: Matrix, movements: float) -> Vector:
    """The shares (n,) of one group from its inner products (n, n)."""
    n = len(product)
    shares = np.zeros(n)
    if n < 2 or not product.any():
        return shares
    squares, right = np.linalg.eigh(product[:-1, :-1])  # XᵀX
    order = np.argsort(squares)[::-1][:RANK]
    kept = order[squares[order] > LEAST_SINGULAR**2 * squares[order[0]]]
    basis = right[:, kept] / np.sqrt(squares[kept])  # U = X basis
    operator = basis.T @ product[:-1, 1:] @ basis  # UᵀY V Σ⁻¹
    values, vectors = np.linalg.eig(operator)
    values = values / np.maximum(np.abs(values), 1.0)
    last = basis.T @ product[:-1, -1]  # the newest movement in the basis
    amplitudes = np.linalg.lstsq(vectors, last.astype(complex), rcond=None)[0]
    shares[:-1] = basis @ (vectors @ (amplitudes * _series(values, movements))).real
    return shares


def _series(values: NDArray[np.complex128], movements: float) -> NDArray[np.complex128]:
    """λ + λ² + … + λ^movements; the last term counts in part."""
    whole = int(movements)
    powers = values[:, None] ** np.arange(1, whole + 2)
    total: NDArray[np.complex128] = powers[:, :whole].sum(1)
    return total + (movements - whole) * powers[:, whole]


class Nowcaster:
    """A linear regression of the next movement on the last ones, learned online for each group
    (weight nowcasting: Jang et al. 2023; Knyazev et al. 2025).

    A group's elements are the rows of the regression, so the normal equations are sums of inner
    products. Each is divided by the mean square of the observation, so that all count alike. The
    prediction applies the regression again and again.
    """

    def __init__(self) -> None:
        self._normal: dict[str, tuple[Matrix, Vector]] = {}
        """The normal equations A x = b of each group: A (lags, lags) and b (lags,)."""

    def learn(self, products: Mapping[str, Matrix]) -> None:
        for group, p in products.items():
            a, b = self._normal.get(group, (np.zeros((LAGS, LAGS)), np.zeros(LAGS)))
            for new in range(LAGS, len(p)):
                lags = [new - 1 - i for i in range(LAGS)]
                inputs = p[np.ix_(lags, lags)]
                size = np.trace(inputs) / LAGS
                if size > 0:
                    a = DECAY * a + inputs / size
                    b = DECAY * b + p[lags, new] / size
            self._normal[group] = a, b

    def coefficients(self, group: str) -> Vector:
        """The share (lags,) of each of the last movements, the newest first, in the next one."""
        if group not in self._normal:
            return np.zeros(LAGS)
        a, b = self._normal[group]
        if not a.any():
            return np.zeros(LAGS)
        solved: Vector = np.linalg.solve(a + RIDGE * np.trace(a) / LAGS * np.eye(LAGS), b)
        return solved / max(1.0, np.abs(solved).sum())  # no movement grows for ever

    def shares(self, products: Mapping[str, Matrix], movements: float) -> dict[str, Vector]:
        return {g: self._forecast(g, len(p), movements) for g, p in products.items()}

    def _forecast(self, group: str, n: int, movements: float) -> Vector:
        """The sum of the next movements, each in terms of the n known ones."""
        factors = self.coefficients(group)
        recent = [np.eye(n)[n - 1 - i] if i < n else np.zeros(n) for i in range(LAGS)]
        total, left = np.zeros(n), movements
        while left > 0:
            following = sum((f * r for f, r in zip(factors, recent, strict=True)), np.zeros(n))
            total += min(left, 1.0) * following
            recent = [following, *recent[:-1]]
            left -= 1.0
        return total

    def state(self) -> dict[str, Any]:
        return {g: [a.tolist(), b.tolist()] for g, (a, b) in self._normal.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._normal = {g: (np.array(a), np.array(b)) for g, (a, b) in state.items()}
