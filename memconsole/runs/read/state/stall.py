"""How long a run may show no progress before it counts as stalled."""

from __future__ import annotations

from memconsole.runs.read.state.pace import slow_step_seconds
from memconsole.runs.read.state.reduce import RunState

STALL_SECONDS = {
    "import": 300.0,
    "data": 300.0,
    "tokenizer": 300.0,
    "build": 300.0,
    "reference": 1800.0,
    "preflight": 1800.0,
    "compile": 1800.0,
    "checkpoint": 300.0,
    "stopping": 900.0,
}
"""The longest silence of the heartbeat that is normal in a phase, in seconds.

The limit in other phases is a minute or twenty slow steps.
"""
FIRST_STEP_SECONDS = 1800.0
"""Limit for the first step of an attempt, which may compile."""


def stall_limit_seconds(state: RunState, phase: str) -> float:
    """How many seconds a phase may show no progress."""
    limit = STALL_SECONDS.get(phase)
    if limit is not None:
        return limit
    slow = slow_step_seconds(state)
    if slow is None:
        return FIRST_STEP_SECONDS
    return max(60.0, 20.0 * slow)
