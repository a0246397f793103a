"""What is told before a run starts: its proposed name, its length, time, weights and memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from memconsole.available_memory import fillable_bytes
from memconsole.memory.run_time import start_seconds, steps_are_known
from memconsole.memory.state.data import units_per_step
from memconsole.memory.table import Estimate, MemoryTable
from memconsole.plan import catalog
from memconsole.plan.data.left_out import left_out
from memconsole.plan.data.mixture import limit_words
from memconsole.plan.machine.budget import Budget
from memconsole.plan.machine.processor import slower_than_fp32
from memconsole.plan.machine.trackers import NAMES, wanted
from memconsole.plan.plan import Plan
from memconsole.plan.processes import processes
from memconsole.plan.tasks import task_of
from memconsole.plan.training import recipe
from memconsole.plan.training.origin import origin
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.labels import NAME_CHARACTERS, shown_name
from memconsole.runs.record.names import check_name
from memconsole.runs.record.redaction import REDACTED
from memconsole.runs.record.run_store import list_runs
from memconsole.units import format_bytes, format_count, format_duration, format_step


def default_name(plan: Plan, taken: Collection[str] | None = None) -> str:
    """A name that no run of `taken` has, by default of all runs: ``stories-python-stdlib-lora-2``."""
    words = [_last(plan.model.name), _last(plan.data.source)]
    o = plan.optimize
    words += ["lora"] if o.lora_rank else []
    words += ["hybrid"] if plan.hybrid.on else []
    words += [plan.backend] if plan.backend != Plan().backend else []
    return free_name(re.sub(r"[^\w.@+-]+", "-", "-".join(words))[:60], taken)


def free_name(name: str, taken: Collection[str] | None = None) -> str:
    """`name`, with a number after it if a run of `taken` has it; by default of all runs."""
    if taken is None:
        try:
            taken = {run.name for run in list_runs()}
        except (RunError, OSError):
            taken = ()
    numbered = (f"{name[: NAME_CHARACTERS - 4]}-{n}" for n in range(2, len(taken) + 3))
    return name if name not in taken else next(n for n in numbered if n not in taken)


def launch_name(plan: Plan, name: str | None) -> str:
    """The name of a new run: `name`, with a number if another run has it; a name made from `plan` if
    there is none. Raises `RunError` for a reserved word."""
    shown = shown_name(name or "", os.environ)
    check_name(shown)
    return free_name(shown) if shown else default_name(plan)


def name_words(run: RunDirectory, name: str | None) -> str:
    """Says why a new run is not called `name`: another run is, or a name cannot hold all of it. Empty if it is."""
    asked = (name or "").strip()
    shown = shown_name(asked, os.environ)
    if REDACTED in shown:
        return f"the name looks like a token or a password: kept as {run.name}"
    if shown not in ("", run.name):
        return f'another run is called "{shown}": this one is {run.name}'
    if shown != asked:
        return f"a name is one line of at most {NAME_CHARACTERS} characters: kept as {run.name}"
    return ""


def after_words(run: RunDirectory) -> str:
    """When a run starts that waits for `run`."""
    return f"after run {run.id} ({run.name}) has ended"


def launch_rows(plan: Plan, priced: Estimate) -> tuple[tuple[str, str], ...]:
    """What the run will do, as (name, words). Raises `PlanError` if its model is not found."""
    task, table = task_of(plan), priced.table
    parameters = f"{format_count(priced.parameters)} parameters"
    if priced.active_parameters is not None:
        parameters += f", {format_count(priced.active_parameters)} a token"
    if priced.trainable_parameters != priced.parameters:
        parameters += f", {format_count(priced.trainable_parameters)} trained"
    pairs = f", {plan.effective_batch // 2:,} pairs" if plan.learns_pairs else ""
    rows = f"{plan.effective_batch:,} rows of {plan.data.sequence_length:,} {task.positions}{pairs} per step"
    kinds, slow = wanted(plan), slow_words(plan, table.budget)
    return (
        ("model", f"{plan.model.name} · {parameters}"),
        ("weights", origin(plan).words),
        ("data", f"{plan.data.source}{limit_words(plan)} · {rows}"),
        *(("files", words) for words in left_out(plan)),
        ("length", _length(plan, priced.run_steps)),
        ("training", recipe.words(plan, total_steps=priced.run_steps)),
        ("time", _time(plan, priced)),
        *((("speed", slow),) if slow else ()),
        *(("note", note.words) for note in priced.notes),
        ("device", f"{_where(plan, table.budget.name)} · {plan.backend}"),
        ("memory", _memory(priced)),
        *((("host RAM", words),) if (words := host_words(plan, table)) else ()),
        *((("tracked", " and ".join(NAMES[kind] for kind in kinds)),) if kinds else ()),
    )


def slow_words(plan: Plan, budget: Budget) -> str:
    """Why the plan's precision takes longer than fp32 on this machine's processor; empty if it does not."""
    precision = plan.optimize.precision
    here = budget.kind == "cpu" and budget.local and plan.launch.on == "here"
    reason = slower_than_fp32(precision, plan.backend) if here else ""
    return f"optimize.precision = {precision}: {reason}" if reason else ""


def host_words(plan: Plan, table: MemoryTable) -> str:
    """That this machine has too little host memory for a run on one of its devices; empty if it has enough, or the host is
    the device."""
    if not table.budget.local or table.budget.kind in ("cpu", "apple") or plan.launch.on != "here":
        return ""
    count, here = processes(plan), fillable_bytes()
    needed = count * (table.host_bytes or 0)
    if needed <= here:
        return ""
    of = "" if count == 1 else f" in {count:,} processes"
    return f"needs {format_bytes(needed)}{of}, this machine has {format_bytes(here)} left: the run may be killed"


def _where(plan: Plan, device: str) -> str:
    """The device, and the job that has it."""
    if plan.launch.on == "here":
        return device
    partition = f" in {plan.launch.partition}" if plan.launch.partition else ""
    limit = f", at most {plan.launch.time_limit}" if plan.launch.time_limit else ""
    own = "its processor" if plan.device.name == "cpu" else device
    return f"a node of Slurm{partition}{limit}: {own}"


def _length(plan: Plan, steps: int | None) -> str:
    t, task = plan.train, task_of(plan)
    epochs = f"{t.epochs:,} epoch" + ("s" if t.epochs != 1 else "")
    if steps is None:
        return f"{epochs}; the steps are known once the data are read"
    known = steps_are_known(plan)
    units = steps * units_per_step(plan, catalog.model(plan))
    words = f"{'' if known else 'about '}{steps:,} steps, {format_count(units)} {task.units}"
    words += "" if known else " (guessed from the size of the data)"
    return words if t.max_steps else f"{epochs}: {words}"


def _time(plan: Plan, priced: Estimate) -> str:
    step = f"{format_step(priced.step_seconds)} a step"
    if priced.run_seconds is None:
        return f"~{step}"
    start = format_duration(start_seconds(plan, catalog.model(plan), priced.table.budget))
    return (
        f"~{format_duration(priced.run_seconds)}, {step}, {start} of it to start; evaluations and "
        "checkpoints come on top"
    )


def _memory(priced: Estimate) -> str:
    table = priced.table
    return f"{format_bytes(table.device_bytes)} of {table.budget.memory_label}: {table.words}"


def _last(name: str) -> str:
    """The part of a path, URL or hub id that tells it apart."""
    return Path(name.rstrip("/")).stem if "/" in name else name
