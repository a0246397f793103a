"""What a watched run was expected to need: the estimate kept at launch, else one made now."""

from __future__ import annotations

from memconsole.devices.reading import Devices
from memconsole.memory.table import Estimate
from memconsole.plan.plan import Plan
from memconsole.tui.pricing import price


def predicted(run_id: str, plan: Plan, devices: Devices | None) -> tuple[Estimate | None, str]:
    """The estimate of a run, or None with the reason in one line."""
    priced = price(plan, devices)
    return priced.estimate, priced.problem
