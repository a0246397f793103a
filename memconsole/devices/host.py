"""Reads this machine's processor and RAM, and how much of it this control group may use."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from memconsole.available_memory import MemoryLimit, memory_limit
from memconsole.devices.apple import sysctl
from memconsole.devices.reading import DeviceReading, Missing
from memconsole.plan.machine import processor
from memconsole.sanitize import clean_line
from memconsole.units import format_bytes

_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz")


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The processor and the current state of memory."""

    processor: str
    ram_bytes: int
    available_bytes: int
    limit: MemoryLimit | None

    @property
    def total_bytes(self) -> int:
        """The most RAM this control group may use."""
        return min(self.ram_bytes, self.limit.limit_bytes) if self.limit else self.ram_bytes

    @property
    def free_bytes(self) -> int:
        """The RAM this control group can still take without swapping."""
        if self.limit:
            return min(self.available_bytes, self.limit.free_bytes)
        return self.available_bytes


def host_facts(root: Path = Path("/")) -> HostFacts:
    """Ask the system. `root` is the directory that holds /proc and /sys."""
    memory = psutil.virtual_memory()
    return HostFacts(
        processor=processor_name(root),
        ram_bytes=int(memory.total),
        available_bytes=int(memory.available),
        limit=memory_limit(root, int(memory.total)),
    )


class Host:
    """Reads the host repeatedly. Utilization is measured between two readings."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before: tuple[float, float] | None = None

    def read(self) -> tuple[DeviceReading, list[str]]:
        facts = host_facts(self._root)
        notes = []
        source = "psutil"
        if facts.limit:
            source = f"psutil, cgroup v{facts.limit.version}"
            notes.append(
                f"host RAM: limited to {format_bytes(facts.limit.limit_bytes)} of "
                f"{format_bytes(facts.ram_bytes)} by a control group"
            )
        reading = DeviceReading(
            id="cpu",
            name=facts.processor,
            kind="cpu",
            memory_label="host RAM",
            total_bytes=facts.total_bytes,
            used_bytes=max(0, facts.total_bytes - facts.free_bytes),
            free_bytes=facts.free_bytes,
            utilization_percent=self._utilization(),
            temperature_celsius=_temperature(),
            power_watts=Missing("not measured for processors"),
            source=source,
        )
        return reading, notes

    def _utilization(self) -> float | Missing:
        times = psutil.cpu_times()
        total = float(sum(times)) - float(getattr(times, "guest", 0.0))
        idle = float(times.idle) + float(getattr(times, "iowait", 0.0))
        before, self._before = self._before, (total, idle)
        if before is None or total <= before[0]:
            return Missing("known from the second reading on")
        busy = (total - before[0]) - (idle - before[1])
        return min(100.0, max(0.0, 100.0 * busy / (total - before[0])))


def processor_name(root: Path = Path("/")) -> str:
    """The processor's model name, as its maker spells it."""
    named = sysctl("machdep.cpu.brand_string") if platform.system() == "Darwin" else None
    return clean_line(named or processor.name(root / "proc/cpuinfo"), 120)


def _temperature() -> float | Missing:
    sensors: Callable[[], dict[str, Any]] | None = getattr(psutil, "sensors_temperatures", None)
    try:
        readings = sensors() if sensors else {}
    except (OSError, ValueError, RuntimeError):
        readings = {}
    for name in _SENSORS:
        if readings.get(name):
            return float(readings[name][0].current)
    return Missing("no sensor is visible here")
