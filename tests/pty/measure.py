"""A program on a pseudo-terminal of its own, and what it uses."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil
from terminal import Terminal

COMMAND = [sys.executable, "-m", "memconsole"]


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """A home of its own for runs and caches, and no sign of SSH."""
    with tempfile.TemporaryDirectory(prefix="memconsole-bar-") as folder:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SSH_", "NO_COLOR"))}
        kept |= {"XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
        before = os.environ.get("XDG_STATE_HOME")
        os.environ["XDG_STATE_HOME"] = kept["XDG_STATE_HOME"]
        try:
            yield kept | {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        finally:
            os.environ.pop("XDG_STATE_HOME")
            if before is not None:
                os.environ["XDG_STATE_HOME"] = before


@contextmanager
def opened(
    env: Mapping[str, str], *arguments: str, command: list[str] | None = None,
    bytes_per_second: int | None = None,
) -> Iterator[Terminal]:  # fmt: skip
    """A console at 80x24."""
    argv = [*(command or COMMAND), *arguments]
    terminal = Terminal(argv, env, 80, 24, bytes_per_second=bytes_per_second)
    try:
        yield terminal
    finally:
        terminal.close()


def cpu_seconds(process: psutil.Process) -> float:
    """Processor seconds of the program and its children, the ended ones included."""
    used = process.cpu_times()
    total: float = used.user + used.system + used.children_user + used.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def used(terminal: Terminal, seconds: float) -> tuple[float, float, float]:
    """Bytes per second, share of a core (children included) and resident MiB (the program's own)."""
    process = psutil.Process(terminal.process.pid)
    sent, cpu, begun = len(terminal.raw), cpu_seconds(process), time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - begun
    rate = (len(terminal.raw) - sent) / passed
    return rate, (cpu_seconds(process) - cpu) / passed, process.memory_info().rss / 2**20


def resident_mib(pid: int) -> float:
    """Resident MiB of a program and its children."""
    process = psutil.Process(pid)
    total = 0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            total += one.memory_info().rss
    return total / 2**20
