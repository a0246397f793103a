"""The device of a plan, found on this machine or in the catalog, and its usable bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

import msgspec

from memconsole.devices.apple import working_set_bytes
from memconsole.devices.frameworks import Framework, framework_of
from memconsole.devices.host import Host
from memconsole.devices.reading import DeviceReading, Devices, Missing
from memconsole.plan import catalog
from memconsole.plan.catalog import CatalogDevice
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.processes import nodes, processes
from memconsole.units import MIB, format_bytes

JAX_GPU_FRACTION = 0.75
"""The share of a GPU that XLA's allocator takes by default.

Source: docs.jax.dev, "GPU memory allocation".
"""

PROCESS = {"torch": ("PyTorch", 293 * MIB), "jax": ("JAX", 339 * MIB)}
"""The backend's name, and what a trainer's process takes of a CPU's memory in addition to what is estimated for its device: the framework with
Python, as in `coefficients.json` (`host_bytes`). A share of the memory (`device.memory_fraction`) does not include it."""

ORDER = {"torch": ("gpu", "rocm", "apple", "cpu"), "jax": ("tpu", "gpu", "rocm", "cpu")}
"""The kinds of device each backend picks for `auto`, best first."""

_NOTES = {
    "cuda": ("NVIDIA", "AMD", "device probe"),
    "tpu": ("TPU", "device probe"),
    "mps": ("Apple", "device probe"),
}
"""How the notes about each kind of name begin."""

_COMMON = r"nvidia|amd|tesla|google|sxm\d?|hbm\d?e?|\d*gb"
"""Words of a device's name that do not identify the product."""

_LABELS = {"gpu": "GPU", "rocm": "AMD GPU", "apple": "Apple GPU", "tpu": "TPU"}


class DevicesUnknown(PlanError):
    """The plan's device may be here, but its driver has not answered yet."""


def names_driver(plan: Plan) -> bool:
    """Whether a driver of this machine must be asked about the plan's device; not for cpu and the catalog."""
    return re.fullmatch(r"auto|mps|tpu|(cuda|tpu):\d+", plan.device.name) is not None


def budget(
    plan: Plan,
    devices: Devices | None,
    *,
    framework: Callable[[str], Framework | None] = framework_of,
    environment: Mapping[str, str] = os.environ,
) -> Budget:
    """The device `plan` would run on, or is planned for, and its usable bytes.

    `devices` is the newest reading of this machine. While it is None, only the processor and the
    catalog are known. Raises `PlanError` naming `device.name`, and `DevicesUnknown` if its driver has not answered yet.
    """
    name = plan.device.name
    if name != "cpu" and not names_driver(plan):
        return _from_catalog(plan, catalog.catalog_device(name))
    readings = devices.devices if devices else (Host().read()[0],)
    if name == "auto":
        reading, remark = _automatic(plan, readings, framework(plan.backend), environment)
        if reading.kind == "cpu" and devices and devices.unanswered:
            remark = remark or f"; GPUs are unknown: no answer from {', '.join(devices.unanswered)}"
    else:
        reading, remark = _named(plan, readings, devices), ""
    resolved = _local(plan, reading)
    return msgspec.structs.replace(resolved, why=resolved.why + remark) if remark else resolved


def _automatic(
    plan: Plan,
    readings: tuple[DeviceReading, ...],
    installed: Framework | None,
    environment: Mapping[str, str],
) -> tuple[DeviceReading, str]:
    """The device the backend would pick, and a remark on a better device that it cannot use."""
    remark = ""
    allowed = environment.get("JAX_PLATFORMS", "") if plan.backend == "jax" else ""
    for kind in ORDER.get(plan.backend, ORDER["torch"]):
        reading = next((device for device in readings if device.kind == kind), None)
        if reading is None:
            continue
        if kind == "cpu":
            return reading, remark
        reason = ""
        if installed is not None and kind not in installed.kinds:
            reason = f"{installed.name} {installed.version} here is built without it"
        elif allowed and not _platform_allowed(kind, allowed):
            reason = f"JAX_PLATFORMS={allowed}"
        elif kind != "tpu" and isinstance(reading.total_bytes, Missing):
            reason = reading.total_bytes.reason
        if not reason:
            return reading, remark
        remark = remark or f"; {_LABELS[kind]} {reading.name} not used: {reason}"
    return Host().read()[0], remark


def _platform_allowed(kind: str, setting: str) -> bool:
    names = {word.strip().lower() for word in setting.split(",")}
    aliases = {"gpu": {"gpu", "cuda"}, "rocm": {"gpu", "rocm"}, "tpu": {"tpu"}, "apple": {"metal"}}
    return bool(names & aliases[kind])


def _named(
    plan: Plan, readings: tuple[DeviceReading, ...], devices: Devices | None
) -> DeviceReading:
    """The device that the plan names. Raises `PlanError`, and `DevicesUnknown` while its driver has not answered."""
    name = plan.device.name
    wanted = "tpu:0" if name == "tpu" else name
    for reading in readings:
        if reading.id == wanted:
            return reading
    if wanted == "cpu":
        return Host().read()[0]
    if devices is None:
        raise DevicesUnknown(
            f'device.name = "{name}": this machine\'s devices are not known yet', "device.name"
        )
    about = _NOTES[wanted.partition(":")[0]]
    silent = tuple(driver for driver in about if driver in devices.unanswered)
    reasons = [note for note in devices.notes if note.startswith(silent or about)]
    why = f" ({'; '.join(reasons)})" if reasons else ""
    if silent:
        raise DevicesUnknown(
            f'device.name = "{name}": not known yet{why}; try again; if the driver\'s own tool, such as '
            "nvidia-smi, does not answer either, restart the machine",
            "device.name",
        )
    here = ", ".join(reading.id for reading in readings) or "none"
    raise PlanError(
        f'device.name = "{name}": no such device here{why}; here: {here}; '
        "a catalog device can be planned for without owning it",
        "device.name",
    )


def _local(plan: Plan, reading: DeviceReading) -> Budget:
    """The budget of a device on this machine: what is free, up to what the framework may take."""
    known = _catalog_entry_of(reading)
    total = reading.total_bytes
    if isinstance(total, Missing):
        if reading.kind == "tpu" and known is not None:
            planned = _from_catalog(plan, known)
            return msgspec.structs.replace(
                planned, name=reading.name, local=True, why=f"{planned.why}, by its type"
            )
        raise PlanError(
            f'device.name = "{plan.device.name}": the memory of {reading.name} is not known: '
            f"{total.reason}",
            "device.name",
        )
    free = reading.free_bytes
    limit, why = _limit(plan, reading.kind, total)
    if isinstance(free, Missing):
        usable, why = limit, f"{why}; free now is n/a: {free.reason}"
    elif free < limit or why == "total":
        usable, why = min(free, limit), "free now"
    else:
        usable = limit
    if reading.kind == "cpu" and plan.device.memory_fraction is None:
        name, taken = PROCESS.get(plan.backend, PROCESS["torch"])
        usable, why = max(0, usable - taken), f"{why}, less {format_bytes(taken)} for {name}"
    if reading.kind == "cpu" and plan.device.count > 1:
        usable, why = _share_of_machine(plan, usable, why)
    return Budget(
        name=reading.name,
        kind=reading.kind,
        memory_label=reading.memory_label,
        total_bytes=total,
        usable_bytes=usable,
        why=why,
        local=True,
        catalog_name=known.name if known else "",
        bandwidth_bytes_per_second=known.bandwidth_bytes_per_second if known else None,
        peak_flops=dict(known.peak_flops) if known else {},
        link_bytes_per_second=known.link_bytes_per_second if known else None,
    )


def _share_of_machine(plan: Plan, usable: int, why: str) -> tuple[int, str]:
    """The part of a machine's memory that each of several devices of a CPU has, and a phrase explaining it. What one process
    takes itself is left out of `usable` already. Raises `PlanError` if the devices do not fill their nodes."""
    machines = nodes(plan) if plan.launch.on == "slurm" else 1
    others, each = processes(plan) // machines - 1, plan.device.count // machines
    if plan.device.memory_fraction is None:
        usable -= others * PROCESS.get(plan.backend, PROCESS["torch"])[1]
        why = f"{why} in each of {others + 1:,} processes" if others else why
    return max(0, usable) // each, f"{why}, shared by {each:,}"


def _from_catalog(plan: Plan, device: CatalogDevice) -> Budget:
    """The budget of a catalog device: what is usable when nothing else runs, up to what the framework may take."""
    if device.kind == "apple":
        # `usable_bytes` is the recommended working set already.
        limit, why = _share(
            device.usable_bytes, "recommended working set", plan.device.memory_fraction
        )
    else:
        limit, why = _limit(plan, device.kind, device.total_bytes)
    if device.usable_bytes <= limit:
        usable, why = device.usable_bytes, "usable when nothing else runs"
    else:
        usable = limit
    return Budget(
        name=device.label,
        kind=device.kind,
        memory_label=device.memory_label,
        total_bytes=device.total_bytes,
        usable_bytes=usable,
        why=why,
        local=False,
        catalog_name=device.name,
        bandwidth_bytes_per_second=device.bandwidth_bytes_per_second,
        peak_flops=dict(device.peak_flops),
        link_bytes_per_second=device.link_bytes_per_second,
    )


def _limit(plan: Plan, kind: str, total: int) -> tuple[int, str]:
    """The most the framework takes of a device with `total` bytes, and a phrase explaining it."""
    fraction = plan.device.memory_fraction
    if kind == "apple":
        return _share(*working_set_bytes(total), fraction)
    if fraction is not None:
        return int(total * fraction), f"{_percent(fraction)} of total (device.memory_fraction)"
    if plan.backend == "jax" and kind in ("gpu", "rocm"):
        return int(total * JAX_GPU_FRACTION), f"{_percent(JAX_GPU_FRACTION)} of total (JAX)"
    return total, "total"


def _share(bytes_: int, why: str, fraction: float | None) -> tuple[int, str]:
    """`device.memory_fraction` of the bytes, or all of them, and a phrase explaining it."""
    if fraction is None:
        return bytes_, why
    return int(bytes_ * fraction), f"{_percent(fraction)} of the {why}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:g} %"


def _catalog_entry_of(reading: DeviceReading) -> CatalogDevice | None:
    """The catalog entry of the same product, which gives its bandwidth and flops.

    All words of the name must match, and the size must be within 10 %.
    """
    if reading.kind == "cpu":
        return None
    if reading.kind == "tpu":
        return catalog.devices().get(reading.name.lower().replace(" ", "-"))
    words = _words(reading.name)
    best: tuple[float, CatalogDevice] | None = None
    for device in catalog.devices().values():
        if device.kind != reading.kind:
            continue
        # Every word of the name must be in the catalog's label: "Laptop" and "PCIe" mark other
        # products.
        if not words <= _words(device.label) or not any(map(_has_digit, words)):
            continue
        difference = 0.0
        if not isinstance(reading.total_bytes, Missing):
            difference = abs(reading.total_bytes / device.total_bytes - 1)
        if difference < 0.1 and (best is None or difference < best[0]):
            best = (difference, device)
    return best[1] if best else None


def _words(name: str) -> set[str]:
    """The words that identify a product, without maker, socket, kind of memory and size."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {word for word in words if not re.fullmatch(_COMMON, word)}


def _has_digit(word: str) -> bool:
    """Whether the word has a digit; such words identify the product: 3060, h200, mi300x."""
    return any(letter.isdigit() for letter in word)
