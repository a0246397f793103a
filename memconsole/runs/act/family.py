"""Finds a run's processes: its children and orphans, which hold no lock, and a suspended supervisor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from memconsole.runs.act.environment import RUN_ID
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import identity, locks

PROC = Path("/proc")


def members(run_id: str, parent: int | None = None) -> list[int]:
    """Living processes of this user that belong to the run.

    They carry the run's marker in their environment or descend from `parent`. This process and
    `parent` are never included. Empty if /proc is missing.
    """
    marker = f"{RUN_ID}={run_id}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in _processes():
        try:
            status = (PROC / str(pid) / "stat").read_bytes()
            fields = status[status.rindex(b")") + 2 :].split()
            if fields[0] in (b"Z", b"X"):
                continue
            parents[pid] = int(fields[1])
            if marker in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.add(pid)
        except (OSError, ValueError):
            continue
    if parent is not None:
        found |= {pid for pid in parents if _descends(pid, parent, parents)}
    return sorted(found - {os.getpid(), parent})


def kill_members(run_id: str, parent: int | None = None) -> int:
    """SIGKILL every member until none is found (ten times at most). Returns the number of kills."""
    hit = 0
    for _ in range(10):
        pids = members(run_id, parent)
        if not pids:
            break
        for pid in pids:
            handle = _handle(pid)
            if handle is None:
                continue
            # Check again through the handle: the process id may have been reused since the scan.
            if pid in members(run_id, parent) and handle.signal(signal.SIGKILL):
                hit += 1
                handle.wait(1.0)
            handle.close()
    return hit


def wake(run: RunDirectory) -> None:
    """Let a run's suspended supervisor go on, so that it serves and records again."""
    pid = locks.holder(run.supervisor_lock)
    handle = _handle(pid) if pid and identity.is_suspended(pid) else None
    if handle is not None:
        handle.signal(signal.SIGCONT)
        handle.close()


def wake_members(run_id: str, parent: int | None = None) -> None:
    """Let every suspended member go on."""
    for pid in filter(identity.is_suspended, members(run_id, parent)):
        handle = _handle(pid)
        if handle is not None:
            if pid in members(run_id, parent):
                handle.signal(signal.SIGCONT)
            handle.close()


def _handle(pid: int) -> identity.ProcessHandle | None:
    """A handle of a living process; None if it is gone."""
    who = identity.identify(pid)
    if who is None:
        return None
    try:
        return identity.ProcessHandle(who)
    except ProcessLookupError:
        return None


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    except OSError:
        return []


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    seen = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False
