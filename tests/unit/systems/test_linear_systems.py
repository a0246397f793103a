"""Families of linear systems: their gains compared with scipy's, their steps with an integrator's."""

from __future__ import annotations

import numpy as np
import pytest

from memconsole_trainer.systems.families import FAMILIES
from memconsole_trainer.systems.features import code, features
from memconsole_trainer.systems.riccati import gain, runge_kutta, solution
from memconsole_trainer.systems.simulation import cost, optimal, simulate
from memconsole_trainer.systems.variants import draw

scipy_linalg = pytest.importorskip("scipy.linalg")


def test_there_are_families_of_every_field_with_up_to_12_states_and_6_controls() -> None:
    fields = {family.field for family in FAMILIES.values()}
    assert fields == {"mechanics", "electronics", "vehicles", "aerospace", "robotics"}
    assert len(FAMILIES) == 36
    sizes = {(len(family.states), len(family.controls)) for family in FAMILIES.values()}
    assert min(n for n, _ in sizes) == 2
    assert max(sizes) == (12, 6)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_variants_gain_is_that_of_scipy_and_makes_it_stable(name: str) -> None:
    variants = draw(FAMILIES[name], 5, 0.2, seed=3)
    assert len({tuple(a.reshape(-1)) for a in variants.a}) == 5
    steps, held = runge_kutta(variants.a, variants.b, variants.seconds)
    for step, into, k in zip(steps, held, variants.k, strict=True):
        p = scipy_linalg.solve_discrete_are(step, into, variants.q, variants.r)
        expected = np.linalg.solve(variants.r + into.T @ p @ into, into.T @ p @ step)
        np.testing.assert_allclose(k, expected, rtol=1e-6, atol=1e-8 * np.abs(expected).max())
        assert np.abs(np.linalg.eigvals(step - into @ k)).max() < 1


def test_a_step_is_that_of_four_runge_kutta_stages_and_close_to_the_exact_one() -> None:
    variants = draw(FAMILIES["quarter_car"], 2, 0.2, seed=0)
    a, b, h = variants.a[1], variants.b[1], variants.seconds
    x, u = np.array([0.1, -0.2, 0.3, 0.4]), np.array([70.0])

    def rate(x: np.ndarray) -> np.ndarray:
        return np.asarray(a @ x + b @ u)

    k1 = rate(x)
    k2 = rate(x + h / 2 * k1)
    k3 = rate(x + h / 2 * k2)
    k4 = rate(x + h * k3)
    step, held = runge_kutta(a, b, h)
    np.testing.assert_allclose(
        step @ x + held @ u, x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), rtol=1e-12
    )
    whole = scipy_linalg.expm(np.block([[a * h, b * h], [np.zeros((1, 5))]]))
    np.testing.assert_allclose(step, whole[:4, :4], atol=1e-4 * np.abs(step).max())


def test_no_control_costs_less_than_the_optimal_one() -> None:
    variants = draw(FAMILIES["cart_pendulum"], 3, 0.2, seed=1)
    step, held = variants.steps()
    starts = np.tile(variants.states / 2, (3, 1))
    still = np.zeros((3, 4000, 4))

    def price(factor: float) -> np.ndarray:
        policy = optimal(factor * variants.k)
        return cost(simulate(step, held, starts, still, policy), variants.q, variants.r)

    p = solution(step, held, variants.q, variants.r)
    np.testing.assert_allclose(price(1.0), np.einsum("ti,tij,tj->t", starts, p, starts), rtol=1e-6)
    for factor in (0.9, 1.1):
        assert (price(factor) > price(1.0)).all()


def test_a_system_that_no_control_stabilizes_is_refused() -> None:
    eye = np.eye(2)[None]
    with pytest.raises(ValueError, match="cannot be made stable"):
        gain(1.5 * eye, np.zeros((1, 2, 1)), np.eye(2), np.eye(1))


def test_features_are_padded_states_and_binary_numbers() -> None:
    np.testing.assert_array_equal(code(12, 6), [1, 1, 0, 1, 1, 0, 0])
    row = features(np.array([[0.5, -1.0, 2.0]]), 2)
    np.testing.assert_array_equal(row, [[0.5, -1, 2] + [0] * 9 + [0, 1, 0, 0, 0, 1, 1]])
