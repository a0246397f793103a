"""Closed-loop trials: policies compared with the optimal control on stored systems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memconsole_trainer.data.windows.systems import StoredFamily
from memconsole_trainer.systems.families import FAMILIES
from memconsole_trainer.systems.features import MOST_STATES
from memconsole_trainer.systems.variants import draw
from memconsole_trainer.tasks.closed_loop import RUNAWAY, SYSTEMS, Trials, chosen

NAMES = ("cart_pendulum", "vessel_positioning")


@pytest.fixture(scope="module")
def families() -> list[StoredFamily]:
    found = []
    for name in NAMES:
        variants = draw(FAMILIES[name], 4, 0.2, seed=0)
        scale = np.arange(1, variants.n_states + 1) * variants.states
        found.append(StoredFamily(0, variants, scale, np.full(variants.n_controls, 3.0)))
    return found


def gains(trials: Trials, families: list[StoredFamily], factor: float) -> Any:
    """The optimal control times a factor, in the model's units."""

    def policy(windows: Any) -> Any:
        controls = np.ones((trials.count, 6))  # outputs beyond a system's controls must not count
        for i, (place, variant) in enumerate(trials.systems):
            family = families[place]
            v = family.variants
            state = windows[i, -1, : v.n_states] * family.state_max
            controls[i, : v.n_controls] = -factor * v.k[variant] @ state / family.control_max
        return controls

    return policy


def test_the_optimal_control_costs_what_it_costs_and_others_more(
    families: list[StoredFamily],
) -> None:
    trials = Trials(families, 32, noise=0.0)
    assert trials.count == 8
    np.testing.assert_allclose(trials.ratios(gains(trials, families, 1.0)), 1.0, rtol=1e-5)
    for factor in (0.7, 1.4):
        assert (trials.ratios(gains(trials, families, factor)) > 1.0002).all()


def test_no_control_costs_more_and_losing_control_costs_the_most(
    families: list[StoredFamily],
) -> None:
    trials = Trials(families, 32, noise=0.01)
    none = trials.ratios(lambda windows: np.zeros((len(windows), 6)))
    assert (none > 1.05).all()
    wrong = trials.ratios(gains(trials, families, -30.0))
    assert (wrong[::2] == RUNAWAY).all()
    np.testing.assert_array_equal(none, trials.ratios(lambda windows: np.zeros((len(windows), 6))))


def test_a_policy_sees_the_last_states_and_the_numbers_of_states_and_controls(
    families: list[StoredFamily],
) -> None:
    trials = Trials(families, 5, noise=0.01)
    seen: list[Any] = []

    def policy(windows: Any) -> Any:
        seen.append(windows.copy())
        return gains(trials, families, 1.0)(windows)

    trials.ratios(policy)
    assert seen[0].shape == (8, 5, 19)
    assert seen[0].dtype == np.float32
    assert np.abs(seen[0][:, :, 0]).min() > 0  # full from the first call on
    np.testing.assert_array_equal(seen[1][:, :-1], seen[0][:, 1:])
    assert not seen[0][0, :, 4:MOST_STATES].any()
    np.testing.assert_array_equal(seen[0][0, 0, MOST_STATES:], [0, 0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(seen[0][1, 0, MOST_STATES:], [0, 1, 1, 0, 1, 1, 0])


def test_systems_are_of_every_family_and_of_different_variants() -> None:
    few = [family for family, _ in chosen([40, 40, 40])]
    assert len(few) == SYSTEMS
    assert [few.count(family) for family in range(3)] == [SYSTEMS // 3] * 3
    many = chosen([50] * 32)
    assert sorted(family for family, _ in many) == list(range(32))
    assert len({variant for _, variant in many}) > 16
    some = [family for family, _ in chosen([3] * 16)]
    assert [f for f in range(16) if some.count(f) == 2] == sorted(some[16:])
    assert np.diff(sorted(some[16:])).max() <= 3  # the families with one more are spread, too
    assert len(chosen([1, 2])) == 3
