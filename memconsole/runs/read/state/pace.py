"""How fast a run goes, from the newest records of its steps: seconds per step, time left, waiting."""

from __future__ import annotations

from memconsole.runs.read.state.reduce import RunState

ENOUGH_STEPS = 20
"""The least number of steps for which the share of waiting is reported."""


def pace_seconds(state: RunState) -> float | None:
    """Recent seconds per step, without compilation, warm-up, evaluating, sampling and saving."""
    steps = sum(count for count, _ in state.step_times)
    if not steps:
        return None
    return sum(count * seconds for count, seconds in state.step_times) / steps


def seconds_per_step(state: RunState) -> float | None:
    """Recent seconds per step, plus this attempt's share of evaluating, sampling and saving."""
    pace = pace_seconds(state)
    if pace is None:
        return None
    done = state.step - state.side_from_step
    return pace + (state.side_seconds / done if done > 0 else 0.0)


def eta_seconds(state: RunState, at: float | None = None) -> float | None:
    """Seconds from step `at` (by default, the last one reported) to the end."""
    pace = seconds_per_step(state)
    if pace is None or state.total_steps is None or state.ended is not None:
        return None
    return max(0.0, (state.total_steps - (state.step if at is None else at)) * pace)


def data_wait_share(state: RunState) -> float | None:
    """Share of the recent steps' time spent waiting for data; None before there is enough of it."""
    waits = state.data_waits
    times = state.step_times[-len(waits) :] if waits else []
    seconds = sum(count * seconds for count, seconds in times)
    if sum(count for count, _ in times) < ENOUGH_STEPS or seconds <= 0:
        return None
    waited = sum(count * wait for (count, _), wait in zip(times, waits, strict=True))
    return min(1.0, waited / seconds)


def slow_step_seconds(state: RunState) -> float | None:
    """The 99th percentile of recent step times."""
    times = sorted(seconds for _, seconds in state.step_times)
    return times[min(len(times) - 1, int(0.99 * len(times)))] if times else None
