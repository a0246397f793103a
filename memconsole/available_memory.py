"""The memory this process can still take, on this machine and in its control group.

Sources: Linux Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current, memory.swap.max,
memory.stat) and cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes, memory.memsw).
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import psutil

_NO_LIMIT = 1 << 60
"""cgroup v1 writes the largest page-aligned number to mean "no limit"."""


class MemoryLimit(msgspec.Struct, frozen=True):
    """A control group's memory limit that is lower than the machine's memory."""

    limit_bytes: int
    free_bytes: int
    """What the group can still take. Inactive file pages, which the kernel drops first, count as
    free.
    """
    fillable_bytes: int
    """The same, with active file pages (the kernel drops them under pressure) and swap counted as
    free.
    """
    version: int


def fillable_bytes(root: Path = Path("/")) -> int:
    """The most this process can fill before the kernel kills it for lack of memory,
    including swap.
    """
    memory = psutil.virtual_memory()
    try:
        swap = int(psutil.swap_memory().free)
    except (OSError, RuntimeError):
        swap = 0
    limit = memory_limit(root, int(memory.total), swap)
    machine = int(memory.available) + swap
    return min(machine, limit.fillable_bytes) if limit else machine


def memory_limit(root: Path, ram_bytes: int, free_swap_bytes: int = 0) -> MemoryLimit | None:
    """The tightest limit of this process's control group and its parents; None without one.

    `root` is the directory that holds /proc and /sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    tightest: MemoryLimit | None = None
    for line in lines:
        hierarchy, controllers, group = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            version = 2
        elif "memory" in controllers.split(","):
            tops = [root / "sys/fs/cgroup/memory"]
            version = 1
        else:
            continue
        for top in tops:
            for folder in _upwards(top, group):
                limit = _limit_of(folder, version, free_swap_bytes)
                if limit is None or limit.limit_bytes >= ram_bytes:
                    continue
                tightest = _tighter(tightest, limit)
    return tightest


def _upwards(top: Path, group: str) -> list[Path]:
    """The group's directory and its parents. In a container the path may exist only on the host."""
    parts = [part for part in group.split("/") if part not in ("", ".", "..")]
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _limit_of(folder: Path, version: int, free_swap_bytes: int) -> MemoryLimit | None:
    """The limit of the control group in `folder`; None if it has none."""
    limit_name, usage_name, prefix = "memory.max", "memory.current", ""
    if version == 1:
        limit_name, usage_name, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    limit = _number(folder / limit_name)
    if limit is None or limit >= _NO_LIMIT:
        return None
    usage = _number(folder / usage_name) or 0
    try:
        stat = (folder / "memory.stat").read_text()
    except OSError:
        stat = ""
    inactive, active = (_field(stat, f"{prefix}{kind}_file") for kind in ("inactive", "active"))
    free = max(0, limit - max(0, usage - inactive))
    fillable = max(0, limit - max(0, usage - inactive - active))
    swap = min(free_swap_bytes, _swap_left(folder, version, max(0, limit - usage)))
    return MemoryLimit(limit, min(free, limit), min(fillable, limit) + swap, version)


def _swap_left(folder: Path, version: int, ram_left: int) -> int:
    """The swap the group may still use. In version 1 the limit covers RAM and swap together."""
    if version == 2:
        limit, used = _number(folder / "memory.swap.max"), folder / "memory.swap.current"
        ram_left = 0
    else:
        limit = _number(folder / "memory.memsw.limit_in_bytes")
        used = folder / "memory.memsw.usage_in_bytes"
    return _NO_LIMIT if limit is None else max(0, limit - (_number(used) or 0) - ram_left)


def _tighter(tightest: MemoryLimit | None, limit: MemoryLimit) -> MemoryLimit:
    """The lowest figures of both limits."""
    if tightest is None:
        return limit
    return MemoryLimit(
        min(tightest.limit_bytes, limit.limit_bytes),
        min(tightest.free_bytes, limit.free_bytes),
        min(tightest.fillable_bytes, limit.fillable_bytes),
        tightest.version,
    )


def _field(stat: str, name: str) -> int:
    """A number of memory.stat; 0 if it is not there."""
    match = re.search(rf"^{name} (\d+)$", stat, re.MULTILINE)
    return int(match[1]) if match else 0


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" and for a file that cannot be read."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None
