"""A decimated curve keeps every extreme, its newest value, and at most 512 points."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from memconsole.runs.read.curves.curve import Curve, GaugeCurves
from memconsole.runs.read.curves.history import RECENT_POINTS, History
from memconsole.runs.read.curves.series import BUCKETS
from memconsole.runs.read.state.reduce import PROFILING, RunState, forget_memory, reduce
from memconsole.runs.record.log import events

STARTED = events.Started(
    attempt=2, backend="torch", versions={}, device_id="cpu", device_name="", device_kind="cpu",
    memory_label="host RAM", platform_lines=(), resumed_step=20,
)  # fmt: skip

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


readings = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 1 << 40)), min_size=1, max_size=1000
)


def gauge(step: int, used: int, *, peak: int | None = None) -> events.Memory:
    return events.Memory(
        phase="train", step=step, allocated_bytes=used, peak_bytes=peak, reserved_bytes=None,
        device_bytes=used + 1, device_total_bytes=None, host_bytes=used + 2,
    )  # fmt: skip


@given(readings)
def test_a_gauges_history_is_small_ascending_and_keeps_the_highest(
    series: list[tuple[int, int]],
) -> None:
    state = RunState()
    for step, used in series:
        reduce(state, gauge(step, used))
    curve = state.gauges.curves().host
    assert max(curve.values) == max(used for _, used in series) + 2
    assert list(curve.steps) == sorted(set(curve.steps))
    assert len(curve.steps) <= 2 * BUCKETS + 1
    assert len(msgspec.json.encode(state.gauges)) < 48_000


def test_of_readings_at_one_step_the_highest_stays_and_a_stretch_counts_by_its_peak() -> None:
    state = RunState()
    for record in (gauge(0, 5), gauge(10, 20, peak=90), gauge(10, 30, peak=40), gauge(20, 7)):
        reduce(state, record)
    curves = state.gauges.curves()
    assert curves.allocated == Curve((0, 10, 20), (5.0, 90.0, 7.0))
    assert curves.device == Curve((0, 10, 20), (6.0, 31.0, 8.0))


def test_a_resumed_attempt_replaces_the_readings_of_the_steps_it_repeats() -> None:
    state = RunState()
    for record in (
        gauge(10, 100), gauge(20, 200), gauge(30, 300),
        STARTED,  # from step 20, and its first readings come before a step
        gauge(0, 50), gauge(25, 250),
    ):  # fmt: skip
        reduce(state, record)
    assert state.gauges.curves().allocated == Curve((10, 20, 25), (100.0, 200.0, 250.0))


def test_a_profiled_stretch_and_a_smaller_micro_batch_leave_no_trace_in_the_history() -> None:
    state = RunState()
    reduce(state, gauge(10, 100))
    reduce(state, msgspec.structs.replace(gauge(11, 900), phase=PROFILING))
    assert max(state.gauges.curves().allocated.values) == 100
    forget_memory(state)
    assert state.gauges.curves() == GaugeCurves()
