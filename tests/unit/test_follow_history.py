"""A decimated curve keeps every extreme, its newest value, and at most 512 points."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from memconsole.runs.history import RECENT_POINTS, History

points = st.lists(
    st.tuples(st.integers(1, 50), st.floats(-1e6, 1e6)), min_size=1, max_size=3000
).map(lambda gaps: _accumulate(gaps))


def _accumulate(gaps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    step, out = 0, []
    for gap, value in gaps:
        step += gap
        out.append((step, value))
    return out


def filled(series: list[tuple[int, float]]) -> History:
    history = History()
    for step, value in series:
        history.add(step, value)
    return history


@given(points)
def test_whole_curve_is_bounded_ascending_and_made_of_real_points(
    series: list[tuple[int, float]],
) -> None:
    curve = filled(series).whole()
    assert len(curve.steps) <= 512
    assert list(curve.steps) == sorted(set(curve.steps))
    assert set(zip(curve.steps, curve.values, strict=True)) <= set(series)
    assert (curve.steps[-1], curve.values[-1]) == series[-1]


@given(points)
def test_whole_curve_keeps_the_extremes(series: list[tuple[int, float]]) -> None:
    values = [value for _, value in series]
    curve = filled(series).whole()
    assert min(curve.values) == min(values)
    assert max(curve.values) == max(values)


@given(points)
def test_recent_curve_is_the_newest_points_unchanged(series: list[tuple[int, float]]) -> None:
    curve = filled(series).recent()
    assert list(zip(curve.steps, curve.values, strict=True)) == series[-RECENT_POINTS:]


@given(points, points, st.integers(0, 4000))
def test_resumed_steps_replace_the_abandoned_ones(
    first: list[tuple[int, float]], second: list[tuple[int, float]], at: int
) -> None:
    history = filled(first)
    history.truncate(at)
    resumed = [(at + step, value) for step, value in second]
    for step, value in resumed:
        history.add(step, value)
    surviving = [point for point in first if point[0] <= at] + resumed
    curve = history.whole()
    assert set(zip(curve.steps, curve.values, strict=True)) <= set(surviving)
    assert (curve.steps[-1], curve.values[-1]) == resumed[-1]
    assert list(curve.steps) == sorted(set(curve.steps))


def test_a_repeated_step_replaces_instead_of_doubling_back() -> None:
    history = filled([(10, 3.0), (20, 2.0), (30, 9.0), (20, 1.5)])
    assert history.whole().steps == (10, 20)
    assert history.whole().values == (3.0, 1.5)


def test_a_long_run_stays_small_even_as_json() -> None:
    history = filled([(step, math.sin(step)) for step in range(200_000)])
    assert len(history.whole().steps) <= 512
    assert len(msgspec.json.encode(history)) < 64 * 1024


def test_a_step_far_beyond_any_run_costs_nothing() -> None:
    history = filled([(1, 1.0), (2, 2.0), (2**63, 3.0)])
    assert history.whole().values == (1.0, 2.0, 3.0)
