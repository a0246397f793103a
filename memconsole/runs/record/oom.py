"""How often the kernel's out-of-memory killer has struck, readable without privileges."""

from __future__ import annotations

import re
from pathlib import Path

from memconsole.runs.record.records import OomCounts


def oom_kills(root: Path = Path("/")) -> OomCounts:
    """Kills on this host and in this process's memory cgroup so far.

    The cgroup's counter counts its own victims whoever ran out of memory: `memory.events` (cgroup v2)
    or `memory.oom_control` (v1), field `oom_kill`. The host's is `/proc/vmstat`.
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
        # Inside a container the path is the host's while the mount shows only the container's group.
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
    """Whether the out-of-memory killer explains a SIGKILL between two readings, and one clause why."""
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
