"""The expected memory of a watched run: the estimate stored at launch, or a new one."""

from __future__ import annotations

from memconsole.devices.reading import Devices, free_later
from memconsole.memory.table import Estimate
from memconsole.plan import catalog
from memconsole.plan.plan import Plan
from memconsole.runs.read.life.ladder import resized_after
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.run_store import find_run
from memconsole.tui.plan.pricing import price


def predicted(run_id: str, plan: Plan, devices: Devices | None) -> tuple[Estimate | None, str]:
    """The estimate of a run, or None with the reason in one line."""
    try:
        stored = kept_estimate(find_run(run_id))
    except (RunError, OSError):
        stored = None
    if stored is not None:
        return stored, ""
    if devices is None and plan.device.name not in {"cpu", *catalog.devices()}:
        return None, "the devices of this machine are not known yet"
    # The run itself holds some of what is free no longer.
    later = None if devices is None else free_later(devices, "the run holds some of it")
    priced = price(plan, later)
    return priced.estimate, priced.problem


def kept_estimate(run: RunDirectory) -> Estimate | None:
    """The estimate that `memconsole.start.start` stored with the run; None if it is missing, or the run went on with other
    sizes."""
    if resized_after(run):
        return None
    return files.read_struct(run.path / "estimate.json", Estimate)
