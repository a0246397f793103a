"""What could have saved a run that ran out of memory, based on what the run measured."""

from __future__ import annotations

from memconsole.calibration import calibrated_price
from memconsole.devices.budget import budget
from memconsole.devices.reading import Devices
from memconsole.memory.answers.advice import Remedy, remedies
from memconsole.memory.answers.correction import OutOfMemoryRun
from memconsole.plan.plan import Plan
from memconsole.runs.read.report.comparison import measured_phases
from memconsole.runs.record.failures.shortfall import Shortfall


def remedies_of(
    plan: Plan, lacked: Shortfall | None, devices: Devices | None
) -> tuple[Remedy, ...]:
    """Every change that lowers the plan's memory on its device, in the order to try them.

    Estimates are calibrated. The bytes are relative to what the failed run needed. Raises `PlanError` for an absent device.
    """
    return remedies(plan, budget(plan, devices), died(lacked), calibrated_price())


def died(lacked: Shortfall | None) -> OutOfMemoryRun | None:
    """The run's shortfall in the form that the estimator takes; None if nothing was measured."""
    if lacked is None:
        return None
    phases = measured_phases([lacked.phase])
    phase = next((name for name, told in phases.items() if lacked.phase in told), "")
    held = lacked.peak_bytes or lacked.held_bytes or 0
    return OutOfMemoryRun(needed_bytes=lacked.needed_bytes, held_bytes=held, phase=phase)
