"""The memory gauges of a watched run, each with its prediction and its history."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memconsole.devices.reading import Missing
from memconsole.memory.table import MemoryTable
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.processes import processes
from memconsole.runs.read.shown.ranks import rank_word
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.state.facts import RunFacts
from memconsole.runs.read.state.ranks import highest
from memconsole.tui.draw.axes import x_axis_end
from memconsole.tui.draw.gauges import Gauge
from memconsole.tui.views.run_view import RunView


def run_gauges(view: RunView) -> list[Gauge]:
    """The gauges of a watched run: its device, its tensors, then its process tree in host RAM. On a CPU the device is the
    host, so that it has no gauge of its own."""
    run = view.snapshot
    if run is None:
        return []
    table = view.prediction.table if view.prediction else None
    facts, started = run.facts, run.facts.started
    label = started.memory_label if started else table.budget.memory_label if table else "device"
    on_cpu = (started.device_kind if started else table.budget.kind if table else "") == "cpu"
    total = _device_total(facts, table)
    gauge = partial(
        Gauge,
        total=total,
        limit=_limit(total, table.budget.usable_bytes if table is not None else None),
        source="trainer",
        last_step=x_axis_end(float(facts.step), facts.total_steps),
    )
    waiting = Missing("no reading yet" if view.live else "left no reading")
    whose = f", fullest {rank_word(facts)}" if facts.ranks else " process"
    tensors = _tensor_gauge(run, table, gauge, waiting, label, on_cpu=on_cpu)
    host = _host_gauge(view, run, table, gauge, waiting, f"host RAM{whose}")
    if on_cpu:
        return [tensors, host]
    return [_device_gauge(run, table, gauge, waiting, f"{label}{whose}"), tensors, host]


def _device_gauge(
    run: RunSnapshot,
    table: MemoryTable | None,
    gauge: Callable[..., Gauge],
    waiting: Missing,
    label: str,
) -> Gauge:
    """What the process takes of the device; of several processes the one that takes most."""
    facts = run.facts
    fullest = highest(*(rank.reading.device_bytes for rank in facts.ranks))
    return gauge(
        label=label,
        used=_device_used(facts, waiting) if fullest is None else fullest,
        peak=facts.peak_device_bytes,
        predicted=table.device_bytes if table is not None else None,
        high=table.band_bytes[1] if table is not None else None,
        history=run.gauges.device,
    )


def _tensor_gauge(
    run: RunSnapshot,
    table: MemoryTable | None,
    gauge: Callable[..., Gauge],
    waiting: Missing,
    label: str,
    *,
    on_cpu: bool,
) -> Gauge:
    """What tensors take; on a CPU, what the process takes."""
    facts, memory = run.facts, run.facts.memory
    shares = plan_shares(run.plan) if on_cpu else 1
    used: int | Missing | None = memory.allocated_bytes if memory is not None else None
    if on_cpu:
        used = _device_used(facts, waiting)
    return gauge(
        label=(f"1/{shares} of " if shares > 1 else "") + f"{label} tensors",
        used=waiting if used is None else used,
        peak=facts.peak_bytes,
        predicted=table.peak_bytes if table is not None else None,
        high=table.band_bytes[1] if table is not None and on_cpu else None,
        history=run.gauges.allocated,
    )


def _host_gauge(
    view: RunView,
    run: RunSnapshot,
    table: MemoryTable | None,
    gauge: Callable[..., Gauge],
    waiting: Missing,
    label: str,
) -> Gauge:
    """What the process tree takes of the host's memory."""
    facts, memory = run.facts, run.facts.memory
    readings = view.devices.devices if view.devices else ()
    total = next((d.total_bytes for d in readings if d.kind == "cpu"), Missing("not probed yet"))
    used = highest(
        memory.host_bytes if memory is not None else None,
        *(rank.reading.host_bytes for rank in facts.ranks),
    )
    return gauge(
        label=label,
        used=used if used is not None else waiting,
        total=total,
        peak=facts.peak_host_bytes,
        predicted=table.host_bytes if table is not None else None,
        limit=total if isinstance(total, int) else None,
        source="psutil",
        history=run.gauges.host,
    )


def _device_used(facts: RunFacts, waiting: Missing) -> int | Missing:
    """The bytes of the device's newest reading: of the process, else of the framework's allocator, else of tensors."""
    memory = facts.memory
    if memory is None:
        return waiting
    figures = (memory.device_bytes, memory.reserved_bytes, memory.allocated_bytes)
    return next((f for f in figures if f is not None), Missing("not reported here"))


def _device_total(facts: RunFacts, table: MemoryTable | None) -> int | Missing:
    memory = facts.memory
    if memory is not None and memory.device_total_bytes is not None:
        return memory.device_total_bytes
    return Missing("not reported") if table is None else table.budget.total_bytes


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
