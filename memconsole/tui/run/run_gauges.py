"""The memory gauges of a watched run, each with its prediction and its history."""

from __future__ import annotations

from functools import partial

from memconsole.devices.reading import Missing
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.processes import processes
from memconsole.runs.read.shown.ranks import rank_word
from memconsole.runs.read.state.ranks import highest
from memconsole.tui.draw.axes import x_axis_end
from memconsole.tui.draw.gauges import Gauge
from memconsole.tui.views.run_view import RunView


def run_gauges(view: RunView) -> list[Gauge]:
    """The gauges of a watched run: its device, its tensors, then its process tree in host RAM."""
    run = view.snapshot
    if run is None:
        return []
    table = view.prediction.table if view.prediction else None
    facts = run.facts
    memory, started = facts.memory, facts.started
    label = started.memory_label if started else table.budget.memory_label if table else "device"
    on_cpu = (started.device_kind if started else table.budget.kind if table else "") == "cpu"
    waiting = Missing("no reading yet" if view.live else "left no reading")
    used: int | Missing = waiting
    if memory is not None:
        figures = (memory.device_bytes, memory.reserved_bytes, memory.allocated_bytes)
        used = next((f for f in figures if f is not None), Missing("not reported here"))
    total: int | Missing = Missing("not reported")
    if memory is not None and memory.device_total_bytes is not None:
        total = memory.device_total_bytes
    elif table is not None:
        total = table.budget.total_bytes
    high = table.band_bytes[1] if table is not None else None
    limit = _limit(total, table.budget.usable_bytes if table is not None else None)
    last_step = x_axis_end(float(facts.step), facts.total_steps)
    gauge = partial(Gauge, total=total, limit=limit, source="trainer", last_step=last_step)
    which = f", fullest {rank_word(facts)}" if facts.ranks else " process"
    gauges: list[Gauge] = []
    if not on_cpu:
        fullest = highest(*(one.reading.device_bytes for one in facts.ranks))
        gauges.append(
            gauge(
                label=f"{label}{which}",
                used=used if fullest is None else fullest,
                peak=facts.peak_device_bytes,
                predicted=table.device_bytes if table is not None else None,
                high=high,
                history=run.gauges.device,
            )
        )
        used = memory.allocated_bytes if memory and memory.allocated_bytes is not None else waiting
    shares = plan_shares(run.plan) if on_cpu else 1
    gauges.append(
        gauge(
            label=(f"1/{shares} of " if shares > 1 else "") + f"{label} tensors",
            used=used,
            peak=facts.peak_bytes,
            predicted=table.peak_bytes if table is not None else None,
            high=high if on_cpu else None,
            history=run.gauges.allocated,
        )
    )
    host_total = next(
        (d.total_bytes for d in (view.devices.devices if view.devices else ()) if d.kind == "cpu"),
        Missing("not probed yet"),
    )
    host_used = highest(
        memory.host_bytes if memory is not None else None,
        *(one.reading.host_bytes for one in facts.ranks),
    )
    gauges.append(
        gauge(
            label=f"host RAM{which}",
            used=host_used if host_used is not None else waiting,
            total=host_total,
            peak=facts.peak_host_bytes,
            predicted=table.host_bytes if table is not None else None,
            limit=host_total if isinstance(host_total, int) else None,
            source="psutil",
            history=run.gauges.host,
        )
    )
    return gauges


def plan_shares(plan: Plan) -> int:
    """Into how many equal shares a process's memory is divided for a gauge. JAX makes several devices of a CPU in one
    process, and its heap does not record which device a byte belongs to."""
    if plan.backend != "jax":
        return 1
    try:
        return plan.device.count // processes(plan)
    except PlanError:
        return 1


def _limit(total: int | Missing, usable: int | None) -> int | None:
    """The most that the run may use: the device's usable bytes in the estimate, or else all of the device."""
    whole = total if isinstance(total, int) else None
    return min(n for n in (whole, usable) if n) if whole or usable else None
