"""Start a run the way both the console and the commands do: checked, priced, then launched."""

from __future__ import annotations

import msgspec

from memconsole.devices.budget import budget
from memconsole.devices.reading import Devices
from memconsole.memory.estimate import estimate
from memconsole.memory.table import Estimate
from memconsole.plan.check import check
from memconsole.plan.optimizations import check_trainable
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.directory import RunDirectory
from memconsole.runs.launch.local import launch


def check_launch(plan: Plan, devices: Devices | None) -> Estimate:
    """The estimate of a plan that can be launched here. Raises `PlanError` for one that cannot."""
    check(plan)
    check_trainable(plan)
    device = budget(plan, devices)
    if not device.local:
        raise PlanError(
            f"device.name = {plan.device.name}: in the catalog, for planning; to train here pick auto or "
            "a device that `memconsole devices` lists",
            "device.name",
        )
    return estimate(plan, device)


def start(plan: Plan, name: str | None, devices: Devices | None) -> RunDirectory:
    """Launch `plan` detached. The estimate is kept with the run, for its receipt. Raises `PlanError`."""
    found = check_launch(plan, devices)
    return launch(plan, name, estimate=msgspec.json.encode(found))
