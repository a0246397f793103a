"""What the pickers of the plan screen list: models, datasets, backends, devices."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from memconsole.devices.cluster import PARTITIONS
from memconsole.devices.reading import Devices
from memconsole.given_path import given_path
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import TASKS, task_of
from memconsole.tui.draw.words import verdict_mark
from memconsole.tui.screens.pick import Choice
from memconsole.units import format_bytes, format_count

SLURM = "slurm:"
"""Begins the value of a choice that is a partition of a Slurm cluster."""
WAIT_SECONDS = 0.2
"""Seconds that the device picker waits for a cluster's partitions. If they come later, the next picker shows them."""
MOST_NAMED = 3
"""Most suffixes of files that the title of the data picker names."""
MOST_FILES = 200
"""Most files that the data picker lists."""
_BACKENDS = {
    "torch": "PyTorch: eager or torch.compile; CPU, CUDA, ROCm, Apple MPS",
    "jax": "JAX, flax NNX: compiled by XLA; CPU, CUDA, ROCm, TPU",
}

Kind = Literal["model", "dataset", "backend", "device"]


def choices_for(kind: Kind, plan: Plan, devices: Devices | None) -> tuple[list[Choice], str | None]:
    """What can be picked, and what may be typed instead, or None."""
    if kind == "model":
        return _models(), "directory or hub id"
    if kind == "dataset":
        return _datasets(plan)
    if kind == "backend":
        return _backends(), None
    return [*_devices_here(devices), *_partitions(), *_catalog_devices(plan)], "device name"


def _models() -> list[Choice]:
    from memconsole.plan import catalog

    rows = []
    for name, model in catalog.models().items():
        size = "sized by model.target_params"
        if model.parameters:
            size = f"{format_count(model.parameters)} parameters"
        rows.append(Choice(name, name, f"{size} · {model.label}"))
    return rows


def _datasets(plan: Plan) -> tuple[list[Choice], str]:
    """The datasets that the plan's task can read, files among them, and what may be typed instead."""
    from memconsole.plan import catalog
    from memconsole.plan.catalog.folders import ROWS, TABLES

    own = task_of(plan).files
    others = {suffix for task in TASKS.values() for suffix in task.files} - TABLES.keys()
    rows = []
    for name, data in catalog.datasets().items():
        suffix = Path(data.where).suffix
        if suffix in own if own else suffix not in others:
            size = f"{format_bytes(data.bytes)} · " if data.bytes else ""
            rows.append(Choice(name, name, f"{size}{data.label or data.note or data.where}"))
    rows += _files_with(own or (*TABLES, *ROWS, ".txt"), plan)
    if own:
        return rows, f"path ({', '.join(own)})" if len(own) <= MOST_NAMED else "path"
    return rows, "path, hf://owner/name or *.h5"


def _backends() -> list[Choice]:
    from memconsole.plan.plan import installed_backends

    return [Choice(name, name, _BACKENDS.get(name, "")) for name in installed_backends()]


def _devices_here(devices: Devices | None) -> list[Choice]:
    """The devices of this machine."""
    rows = [Choice("auto", "auto", "the best device of this machine")]
    local = {reading.id: reading for reading in (devices.devices if devices else ())}
    for reading in local.values():
        total = reading.total_bytes
        size = format_bytes(total) if isinstance(total, int) else "size n/a"
        note = f"{size} {reading.memory_label} · {reading.name} · this machine"
        rows.append(Choice(reading.id, reading.id, note))
    if "cpu" not in local:
        rows.append(Choice("cpu", "cpu", "this machine's processor"))
    return rows


def _partitions() -> list[Choice]:
    """The partitions of the Slurm cluster that this machine submits to."""
    return [
        Choice(SLURM + p.name, SLURM + p.name, f"a Slurm job · {p.words}")
        for p in PARTITIONS.latest(WAIT_SECONDS)
    ]


def _catalog_devices(plan: Plan) -> list[Choice]:
    """The devices of the catalog, each with whether the plan fits it."""
    from memconsole.plan import catalog

    verdicts = _verdicts(plan)
    rows = []
    for name, device in catalog.devices().items():
        size = f"{format_bytes(device.total_bytes)} {device.memory_label}"
        note = f"{size} · {verdicts.get(name, 'not for this backend')} · {device.label} · catalog"
        rows.append(Choice(name, name, note))
    return rows


def _files_with(suffixes: tuple[str, ...], plan: Plan) -> list[Choice]:
    """The files with one of these suffixes in the working folder and beside the plan's data."""
    from memconsole.plan.catalog.folders import plain_suffix

    beside = given_path(plan.data.source).parent
    choices: dict[Path, Choice] = {}
    with contextlib.suppress(OSError):
        here = Path.cwd()
        for folder in (here, here / beside):
            for file in sorted(folder.iterdir()) if folder.is_dir() else ():
                if plain_suffix(file.name) in suffixes and file.is_file():
                    name = str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
                    note = f"{format_bytes(file.stat().st_size)} · {file.parent}"
                    choices.setdefault(file.resolve(), Choice(name, name, note))
    return list(choices.values())[:MOST_FILES]


def _verdicts(plan: Plan) -> dict[str, str]:
    """Whether the current plan fits each catalog device, and which is the smallest that it fits."""
    from memconsole.devices.planned import catalog_budgets
    from memconsole.memory.answers.solve import planned_on, smallest_device
    from memconsole.memory.estimate import table_of
    from memconsole.plan import catalog
    from memconsole.plan.plan import PlanError

    try:
        budgets = catalog_budgets(plan)
        tables = {name: table_of(planned_on(plan, name), on) for name, on in budgets.items()}
    except PlanError:
        budgets, tables = {}, {}
    if not budgets:  # what is wrong with the plan is wrong on every device
        return dict.fromkeys(catalog.devices(), "not priced")
    words = {name: verdict_mark(table.verdict, "too small") for name, table in tables.items()}
    smallest = smallest_device(plan, budgets)
    return words | ({smallest: "✓ smallest that fits"} if smallest else {})
