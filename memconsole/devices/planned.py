"""What `fit` needs to know about devices: catalog budgets, how many there are, whether a compiler is missing here."""

from __future__ import annotations

from itertools import takewhile

import msgspec

from memconsole.devices.budget import budget
from memconsole.devices.reading import DeviceReading, Devices, Missing
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.machine import compilers
from memconsole.plan.machine.budget import SEVERAL, Budget
from memconsole.plan.plan import Plan, PlanError

AS_MUCH = 0.95
"""The share of one device's free memory that another one needs to count as equal."""


def catalog_budgets(plan: Plan) -> dict[str, Budget]:
    """The budget of every catalog device that the plan's backend can use, as many of them as the plan has, keyed by device
    name."""
    budgets = {}
    for name in catalog.devices():
        device = msgspec.structs.replace(plan.device, name=name)
        on_device = msgspec.structs.replace(plan, device=device)
        try:
            check(on_device)
        except PlanError:
            continue
        found = budget(on_device, None)
        if plan.device.count == 1 or found.kind in SEVERAL:
            budgets[name] = found
    return budgets


def devices_allowed(plan: Plan, devices: Devices | None, device: Budget) -> int:
    """How many devices `fit` may use by default: `device.count` of the plan, or the number of equal devices in this
    machine if that is more. Equal are GPUs or TPU cores of the same product with as much free memory, counted from the
    plan's device on. `device` is the budget of the plan's device.
    """
    if not device.local or device.kind not in SEVERAL or devices is None:
        return plan.device.count
    alike = [reading for reading in devices.devices if reading.kind == device.kind]
    name = plan.device.name
    start = next((n for n, reading in enumerate(alike) if reading.id == name), 0)
    here = takewhile(lambda reading: _as_good(reading, device), alike[start:])
    return max(plan.device.count, len(list(here)))


def check_count(plan: Plan, devices: Devices | None, device: Budget) -> None:
    """Raise `PlanError` if this machine has fewer GPUs or TPU cores than the plan trains on, counted from the plan's device
    on. `device` is the budget of the plan's device. Unknown devices are not counted."""
    if not device.local or device.kind not in SEVERAL or devices is None:
        return
    alike = [reading for reading in devices.devices if reading.kind == device.kind]
    name, count = plan.device.name, plan.device.count
    start = next((n for n, reading in enumerate(alike) if reading.id == name), 0)
    here = len(alike[start:])
    if 0 < here < count:
        there = f"from {name} on, this machine has" if start else "this machine has"
        raise PlanError(
            f"device.count = {count:,}: {there} {here:,} of them; expected at most {here:,}",
            "device.count",
        )


def _as_good(reading: DeviceReading, device: Budget) -> bool:
    free = reading.free_bytes
    room = isinstance(free, Missing) or free >= AS_MUCH * device.usable_bytes
    return reading.name == device.name and room


def missing_compiler(plan: Plan, device: Budget) -> str:
    """The compiler that torch.compile needs and this machine lacks; empty if the device is in another machine."""
    here = plan.backend == "torch" and device.local
    return compilers.missing_compiler(device.kind) if here else ""
