"""Counts the kills of the kernel's out-of-memory killer; needs no privileges."""

from __future__ import annotations

import re
from pathlib import Path

from memconsole.runs.record.records import OomCounts


def oom_kills(root: Path = Path("/")) -> OomCounts:
    """The kills so far, on this host and in this process's memory cgroup.

    The cgroup counts kills of its own processes, whichever cgroup ran out of memory: field
    `oom_kill` of `memory.events` (cgroup v2) or `memory.oom_control` (v1). The host's count is in
    `/proc/vmstat`.
    """
    return OomCounts(host=_field(root / "proc/vmstat"), cgroup=_cgroup(root))


def _cgroup(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.oom_control" if controllers else "memory.events"
        mounts = ("memory",) if controllers else ("", "unified")
        # In a container the path is the host's, but the mount shows only the container's group.
        for mount in mounts:
            base = root / "sys/fs/cgroup" / mount
            for folder in (base / path.lstrip("/"), base):
                count = _field(folder / name)
                if count is not None:
                    return count
    return None


def _field(path: Path) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    match = re.search(r"^oom_kill (\d+)$", text, re.M)
    return int(match[1]) if match else None


def oom_evidence(before: OomCounts, now: OomCounts) -> tuple[bool, str]:
    """Whether the out-of-memory killer explains a SIGKILL between two readings, and why."""
    if before.cgroup is not None and now.cgroup is not None:
        if now.cgroup > before.cgroup:
            return True, f"the memory cgroup counted {_grew(before.cgroup, now.cgroup)}"
        if before.host is not None and now.host is not None and now.host > before.host:
            return False, "the host killed a process of another cgroup for lack of memory meanwhile"
        return False, "the kernel recorded no out-of-memory kill"
    if before.host is not None and now.host is not None:
        if now.host > before.host:
            return True, f"/proc/vmstat counted {_grew(before.host, now.host)}"
        return False, "the kernel recorded no out-of-memory kill"
    return False, "out-of-memory kills are not counted on this system"


def _grew(before: int, now: int) -> str:
    return (
        f"{now - before} out-of-memory kill{'s' * (now - before > 1)} (oom_kill {before} → {now})"
    )
