"""Phases, confidence, bandit, monitor and predictors of hybrid training against scripted sequences."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from memconsole.plan.sections.hybrid import HybridChoice
from memconsole_trainer.control.bandit import EXPLORATION, Bandit
from memconsole_trainer.control.monitor import LEAST, WARNINGS, WINDOW, Monitor, Reaction
from memconsole_trainer.control.phases import Confidence, Phases
from memconsole_trainer.control.predictor import LAGS, DynamicModes, Extrapolation, Nowcaster
from memconsole_trainer.control.trend import Trend
from memconsole_trainer.jumps import SHRINKAGE, shrunk_sum

CHOICE = HybridChoice(
    mode="balanced", warmup_steps=2, full_steps=3, correct_steps=2, predict_rounds=2,
    correction_interval=2, confidence=0.5,
)  # fmt: skip


def walked(
    steps: int, confidence: float = 1.0, ready: bool = True, choice: HybridChoice = CHOICE
) -> str:
    """The first letters of the phases of so many steps."""
    phases, found = Phases.begin(choice), ""
    for _ in range(steps):
        found += phases.phase[0]
        phases.after_step(choice, confidence, ready)
    return found


def test_phases_follow_each_other_and_a_full_one_comes_after_so_many_rounds() -> None:
    assert walked(24) == "ww" + "fff" + "ppcc" * 2 + "fff" + "ppcc" * 2


def test_nothing_is_predicted_without_confidence_or_snapshots() -> None:
    assert walked(12, confidence=0.49) == "ww" + "f" * 10
    assert walked(12, ready=False) == "ww" + "f" * 10
    none = msgspec.structs.replace(CHOICE, warmup_steps=0)
    assert walked(5, choice=none) == "fffpp"


def test_a_rejected_jump_ends_its_phase_and_a_forced_full_phase_begins_anew() -> None:
    phases = Phases(phase="predict", length=5)
    phases.cut()
    phases.after_step(CHOICE, 1.0, True)
    assert (phases.phase, phases.left) == ("correct", 2)
    phases.force_full(CHOICE, 2)
    assert (phases.phase, phases.left, phases.rounds) == ("full", 6, 0)


def test_confidence_falls_with_failures_and_returns_ever_more_slowly() -> None:
    confidence = Confidence()
    confidence.score(0.2, 0.1, True)
    assert confidence.value == 1.0  # half of what was predicted is enough
    confidence.score(0.2, 0.05, True)
    assert confidence.value == 0.875
    waits = []
    for _ in range(3):
        confidence.score(0.2, -0.1, False)
        waits.append(0)
        while confidence.value < 0.85:
            confidence.recover()
            waits[-1] += 1
    assert waits == sorted(waits)
    assert waits[-1] > waits[0] > 0


def test_the_bandit_prefers_what_paid_and_shrinks_after_a_rollback() -> None:
    bandit, context = Bandit(40, 2), np.array([1.0, 0.5])
    assert bandit.horizons == [5, 10, 20, 40]
    assert bandit.bound(0, context) == pytest.approx(EXPLORATION * math.sqrt(1.25))
    for _ in range(6):
        bandit.learn(20, context, 0.9, True)
        bandit.learn(40, context, 0.1, True)
        bandit.learn(10, context, 0.0, True)
        bandit.learn(5, context, 0.0, True)
    assert bandit.choose(context) == 20
    bandit.learn(20, context, 0.0, False)
    assert bandit.allowed == 2
    assert bandit.choose(context) in (5, 10)
    bandit.learn(5, context, 0.0, False)
    assert (bandit.allowed, bandit.choose(context)) == (1, 5)
    bandit.learn(5, context, 0.0, True)
    assert bandit.allowed == 2
    again = Bandit(40, 2)
    again.load_state(bandit.state())
    assert [again.bound(i, context) for i in range(4)] == [
        bandit.bound(i, context) for i in range(4)
    ]


def test_the_bound_is_that_of_ridge_regression() -> None:
    bandit, draw = Bandit(8, 3), np.random.default_rng(0)
    contexts, rewards = draw.normal(size=(9, 3)), draw.normal(size=9)
    for context, reward in zip(contexts, rewards, strict=True):
        bandit.learn(8, context, reward, True)
    a = contexts.T @ contexts + np.eye(3)
    x = draw.normal(size=3)
    expected = x @ np.linalg.solve(a, contexts.T @ rewards)
    expected += EXPLORATION * math.sqrt(x @ np.linalg.inv(a) @ x)
    assert bandit.bound(3, x) == pytest.approx(expected)


NORM = 3.0


def quiet(steps: int = 3 * LEAST) -> Monitor:
    """A monitor that has seen losses of 2 ± 0.03 and norms of 3."""
    monitor, draw = Monitor(), np.random.default_rng(1)
    for _ in range(steps):
        judged = monitor.observe(2 + float(draw.normal()) / 30, NORM, CHOICE)
        assert judged.reaction <= Reaction.FULL
    return monitor


@pytest.mark.parametrize(
    ("sigmas", "times", "verdict"),
    [
        (0.0, 1.0, Reaction.FINE),
        (2.5, 1.0, Reaction.SHORTER),
        (3.5, 1.0, Reaction.FULL),
        (7.0, 1.0, Reaction.ROLLBACK),
        (-9.0, 1.0, Reaction.FINE),
        (0.0, 150.0, Reaction.FULL),
        (0.0, 900.0, Reaction.FULL),
        (0.0, 1100.0, Reaction.ROLLBACK),
        (0.0, 0.005, Reaction.FULL),
        (math.nan, 1.0, Reaction.ROLLBACK),
        (0.0, math.inf, Reaction.ROLLBACK),
    ],
)
def test_the_monitor_judges_losses_and_norms(
    sigmas: float, times: float, verdict: Reaction
) -> None:
    monitor = quiet()
    loss = monitor.mean + sigmas * monitor.sigma
    judged = monitor.observe(loss, times * NORM, CHOICE)
    assert judged.reaction is verdict
    assert bool(judged.reason) == (verdict is not Reaction.FINE)


def test_warnings_in_a_row_are_critical_and_a_step_that_is_not_finite_is_not_counted() -> None:
    monitor = quiet()
    verdicts = [monitor.observe(monitor.mean, 150 * NORM, CHOICE).reaction for _ in range(WARNINGS)]
    assert verdicts == [Reaction.FULL] * (WARNINGS - 1) + [Reaction.ROLLBACK]
    before = monitor.mean, monitor.norm, monitor.seen
    monitor.observe(math.nan, NORM, CHOICE)
    assert (monitor.mean, monitor.norm, monitor.seen) == before


def test_a_loss_that_swings_from_step_to_step_oscillates_once_a_window_is_full() -> None:
    monitor = Monitor()
    judged = [
        monitor.observe(2 + 0.5 * (-1) ** step, NORM, CHOICE) for step in range(WINDOW + WARNINGS)
    ]
    verdicts = [one.reaction for one in judged]
    assert verdicts[:WINDOW] == [Reaction.FINE] * WINDOW
    assert verdicts[WINDOW:] == [Reaction.FULL] * (WARNINGS - 1) + [Reaction.ROLLBACK]
    assert judged[WINDOW].reason == "the loss oscillates"


def products(movements: Any) -> dict[str, Any]:
    return {"w": np.asarray(movements) @ np.asarray(movements).T}


def test_extrapolation_continues_the_mean() -> None:
    (shares,) = Extrapolation().shares(products(np.eye(4)), 2.0).values()
    assert np.allclose(shares, 0.5)


def test_dynamic_modes_continue_a_linear_system() -> None:
    """Movements of x' = A x with two decaying modes among 50 weights."""
    draw = np.random.default_rng(0)
    basis = np.linalg.qr(draw.normal(size=(50, 2)))[0]
    movements = np.array([basis @ (np.array([0.9, -0.6]) ** t * [3.0, 2.0]) for t in range(6)])
    (shares,) = DynamicModes().shares(products(movements), 3.0).values()
    expected = sum(basis @ (np.array([0.9, -0.6]) ** t * [3.0, 2.0]) for t in range(6, 9))
    assert np.allclose(shares @ movements, expected, atol=1e-8)
    (part,) = DynamicModes().shares(products(movements), 0.5).values()
    assert np.allclose(part @ movements, 0.5 * basis @ (np.array([0.9, -0.6]) ** 6 * [3.0, 2.0]))


def test_the_nowcaster_learns_a_recurrence_online_and_forgets_an_older_one() -> None:
    def grown(factors: tuple[float, ...], seed: int, count: int = 8) -> Any:
        draw = np.random.default_rng(seed)
        found = [draw.normal(size=400) for _ in range(LAGS)]
        for _ in range(count):
            lags = zip(factors, reversed(found[-LAGS:]), strict=True)
            found.append(sum((f * x for f, x in lags), np.zeros(400)))
        return np.array(found)

    nowcaster = Nowcaster()
    assert not nowcaster.coefficients("w").any()
    for seed in range(3):
        nowcaster.learn(products(grown((0.5, 0.2, -0.1), seed)))
    assert np.allclose(nowcaster.coefficients("w"), (0.5, 0.2, -0.1), atol=0.05)
    movements = grown((0.5, 0.2, -0.1), 9)
    (shares,) = nowcaster.shares(products(movements), 2.0).values()
    following = [movements[-3], movements[-2], movements[-1]]
    for _ in range(2):
        following.append(0.5 * following[-1] + 0.2 * following[-2] - 0.1 * following[-3])
    expected = following[-2] + following[-1]
    away = np.linalg.norm(shares @ movements - expected) / np.linalg.norm(expected)
    assert away < 0.15
    for seed in range(20, 24):
        nowcaster.learn(products(grown((-0.3, 0.1, 0.0), seed)))
    assert np.allclose(nowcaster.coefficients("w"), (-0.3, 0.1, 0.0), atol=0.05)
    again = Nowcaster()
    again.load_state(nowcaster.state())
    assert np.array_equal(again.coefficients("w"), nowcaster.coefficients("w"))


def test_a_path_leaves_out_the_weights_whose_movements_are_noise() -> None:
    steady, noisy = [1.0, 1.1, 0.9, 1.0], [1.0, -1.0, 2.0, -1.5]
    moved = np.array([steady, noisy], np.float32).T
    found = shrunk_sum(moved, np.full(4, 0.5))
    error = np.var(steady, ddof=1) / 4
    assert found[0] == pytest.approx(0.5 * 4.0 * (1 - SHRINKAGE * error / 1.0), rel=1e-5)
    assert found[1] == 0.0


def test_a_reward_compares_a_jump_with_gradient_steps() -> None:
    trend = Trend()
    for step in range(20):
        trend.add(3.0 - 0.01 * step)
    assert trend.decrease == pytest.approx(0.01)
    assert trend.reward(0.02, 2.0) == pytest.approx(math.tanh(1.0))
    assert trend.reward(0.0, 2.0) == 0.0
