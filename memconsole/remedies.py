"""What could have saved a run that ran out of memory, based on what the run measured."""

from __future__ import annotations

from memconsole.calibration import receipts_here
from memconsole.devices.budget import budget
from memconsole.devices.reading import Devices
from memconsole.memory.answers.advice import Remedy, remedies
from memconsole.memory.answers.correction import OutOfMemoryRun
from memconsole.plan.plan import Plan
from memconsole.runs.read.report.comparison import measured_phases
from memconsole.runs.record.failures.shortfall import Shortfall


def remedies_of(
    plan: Plan, shortfall: Shortfall | None, devices: Devices | None
) -> tuple[Remedy, ...]:
    """Every change that lowers the plan's memory on its device, in the order to try them.

    Estimates are calibrated. The bytes are relative to what the failed run needed. Raises `PlanError` for an absent device.
    """
    return remedies(
        plan, budget(plan, devices), out_of_memory_run(shortfall), receipts_here().price()
    )


def out_of_memory_run(shortfall: Shortfall | None) -> OutOfMemoryRun | None:
    """The run's shortfall in the form that the estimator takes; None if nothing was measured."""
    if shortfall is None:
        return None
    phases = measured_phases([shortfall.phase])
    phase = next((name for name, names in phases.items() if shortfall.phase in names), "")
    held = shortfall.peak_bytes or shortfall.held_bytes or 0
    return OutOfMemoryRun(needed_bytes=shortfall.needed_bytes, held_bytes=held, phase=phase)
