"""Checks, prices and launches a run, for the console and for the commands."""

from __future__ import annotations

import msgspec

from memconsole.announcing import launch_name
from memconsole.calibration import calibrated_here
from memconsole.devices.budget import budget
from memconsole.devices.planned import check_count
from memconsole.devices.reading import Devices, free_later
from memconsole.inspection import count_items
from memconsole.memory.estimate import Lookup, estimate
from memconsole.memory.table import Estimate
from memconsole.plan import catalog
from memconsole.plan.check import check, check_start
from memconsole.plan.data.paths import anywhere, check_made
from memconsole.plan.data.readable import check_readable
from memconsole.plan.jobs.on_node import check_job
from memconsole.plan.machine.packages import check_packages
from memconsole.plan.machine.trackers import check_trackers
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole.plan.training.recipe import settings_by_recipe, with_recipe
from memconsole.runs.act.launch import launch
from memconsole.runs.record.directory import RunDirectory


def check_launch(plan: Plan, devices: Devices | None, lookup: Lookup | None = None) -> Estimate:
    """The estimate of a plan that can be launched here, as exact as `lookup` allows.

    Raises `PlanError` if the plan cannot be launched here.
    """
    check(plan)
    check_made(plan)
    device = budget(plan, devices)
    check_trainable(plan, device.kind)
    check_start(plan)
    check_packages(plan)
    check_readable(plan)
    count_items(plan)
    check(plan)
    check_trackers(plan)
    if plan.launch.on == "slurm":
        check_job(plan)
    elif not device.local:
        raise PlanError(
            f"device.name = {plan.device.name}: in the catalog, for planning; to train here pick auto or "
            "a device that `memconsole devices` lists",
            "device.name",
        )
    else:
        check_count(plan, devices, device)
    return estimate(plan, device, lookup)


def devices_then(devices: Devices | None, after: RunDirectory | None) -> Devices | None:
    """`devices` as far as they are known for the time when a run starts: now, or once the run `after` has ended."""
    if devices is None or after is None:
        return devices
    return free_later(devices, f"run {after.id} is to end first")


def start(
    plan: Plan,
    name: str | None,
    devices: Devices | None,
    lookup: Lookup | None = None,
    after: RunDirectory | None = None,
) -> RunDirectory:
    """Launch `plan` detached and store its estimate for the run screen and the receipt, calibrated as
    the person saw it. It starts once the run `after` has ended, if that is given. A run without a name
    gets one, and a number if another run has the name. Raises `PlanError`, and `RunError` for a name that is
    reserved or a run that cannot be waited for."""
    priced = calibrated_here(plan, check_launch(plan, devices, lookup))
    given = anywhere(catalog.with_sizes(plan))  # its model must not depend on the data file
    return launch(
        with_recipe(given),
        launch_name(plan, name),
        estimate=msgspec.json.encode(priced),
        by_recipe=settings_by_recipe(given),
        after=after,
    )
