"""Reads Apple silicon, where processor and GPU share one memory.

Only a running GPU program can tell how much GPU memory it uses.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import psutil

from memconsole.devices.reading import DeviceReading, Missing
from memconsole.sanitize import clean_line

GIB = 2**30
_UNKNOWN = Missing("macOS does not tell without administrator rights")

Ask = Callable[[str], str | None]
"""Returns the value of a sysctl, None if there is none."""


def sysctl(name: str) -> str | None:
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def read_apple(
    platform: str = sys.platform, ask: Ask = sysctl
) -> tuple[list[DeviceReading], list[str]]:
    """The GPU of an Apple-silicon Mac as `mps`; nothing on other machines. Never raises."""
    if platform != "darwin":
        return [], []
    chip = clean_line(ask("machdep.cpu.brand_string") or "", 120)
    if not chip.startswith("Apple"):
        return [], [f"Apple: {chip or 'this Mac'} has no GPU that PyTorch or JAX can use"]
    total = ask("hw.memsize")
    total_bytes = int(total) if total and total.isdigit() else Missing("hw.memsize has no value")
    return [
        DeviceReading(
            id="mps",
            name=chip,
            kind="apple",
            memory_label="unified memory",
            total_bytes=total_bytes,
            used_bytes=Missing("only a running trainer can tell its GPU memory"),
            free_bytes=int(psutil.virtual_memory().available),
            utilization_percent=_UNKNOWN,
            temperature_celsius=_UNKNOWN,
            power_watts=_UNKNOWN,
            source="sysctl",
        )
    ], []


def working_set_bytes(total_bytes: int, ask: Ask = sysctl) -> tuple[int, str]:
    """An approximation of Metal's recommendedMaxWorkingSetSize, and the source of the figure.

    Metal gives the exact value only to programs that link it. Reported values are two thirds of the
    memory up to 32 GiB (10.67 of 16, 21.33 of 32) and three quarters above (27 of 36, 48 of 64).
    ``iogpu.wired_limit_mb`` overrides it. PyTorch: torch.mps.recommended_max_memory.
    """
    limit = ask("iogpu.wired_limit_mb")
    if limit and limit.isdigit() and int(limit) > 0:
        return min(int(limit) * 2**20, total_bytes), "iogpu.wired_limit_mb"
    if total_bytes <= 32 * GIB:
        return total_bytes * 2 // 3, "recommended working set, 2/3 of memory"
    return total_bytes * 3 // 4, "recommended working set, 3/4 of memory"
