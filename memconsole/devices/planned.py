"""What `fit` needs to know of devices: catalog budgets, and whether a compiler is missing here."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import msgspec

from memconsole.devices.budget import budget
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError


def catalog_budgets(plan: Plan) -> dict[str, Budget]:
    """The budget of every catalog device that the plan's backend can use, keyed by device name."""
    found = {}
    for name in catalog.devices():
        device = msgspec.structs.replace(plan.device, name=name)
        moved = msgspec.structs.replace(plan, device=device)
        try:
            check(moved)
        except PlanError:
            continue
        found[name] = budget(moved, None)
    return found


def missing_compiler(plan: Plan, device: Budget) -> str:
    """The compiler that torch.compile needs and this machine lacks.

    Empty if nothing is missing or the device is in another machine.
    `memconsole_torch.techniques.compilation` checks the same at launch; this check does not import
    torch.
    """
    if plan.backend != "torch" or not device.local:
        return ""
    if device.kind in ("gpu", "rocm"):
        return "" if find_spec("triton") else "triton"
    if device.kind != "cpu":
        return ""
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    found = any(name and shutil.which(name) for name in compilers)
    return "" if found else "a C++ compiler (g++ or clang++)"
