"""Corrects the estimated time of a step with finished runs of the device.

How fast a device is, and how busy, changes all estimates of a backend on it by about one factor. After one run that
factor is known. Runs of the plan's own setup tell it better than other runs do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import msgspec

from memconsole.memory.answers.receipts import Machine, Measured, same_machine, setup_of
from memconsole.memory.table import Estimate, Tier
from memconsole.plan.plan import Plan, PlanError

LEAST_STEPS = 5
"""The rate of a shorter run is not used: its first steps are slow."""

Rate = Callable[[Plan], float]
"""Estimates tokens (or the task's units) per second of a plan, by formula."""


def slowdown(plan: Plan, machine: Machine, runs: Iterable[Measured], rate: Rate) -> float | None:
    """The median of measured over estimated time, of runs of the setup or else of the backend; None without runs."""
    known = [
        run
        for run in runs
        if run.units_per_second
        and run.plan.backend == plan.backend
        and run.plan.device.count == plan.device.count
        and same_machine(run, machine)
    ]
    own = [run for run in known if setup_of(run.plan) == setup_of(plan)]
    factors = []
    for run in own or known:
        try:
            factors.append(rate(run.plan) / (run.units_per_second or 1.0))
        except (PlanError, ValueError, ZeroDivisionError):
            continue
    return statistics.median(factors) if factors else None


def paced(found: Estimate, factor: float) -> Estimate:
    """`found` with every time of its steps multiplied by `factor`. The start of a run stays as long as it was."""
    minutes, whole = found.epoch_minutes, found.run_seconds
    more = (found.run_steps or 0) * found.step_seconds * (factor - 1)
    return msgspec.structs.replace(
        found,
        step_seconds=found.step_seconds * factor,
        tokens_per_second=found.tokens_per_second / factor,
        epoch_minutes=None if minutes is None else minutes * factor,
        run_seconds=None if whole is None else whole + more,
        time_tier=Tier.CALIBRATED,
    )
