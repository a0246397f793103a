"""Identifies processes by boot and start time, so that a signal cannot hit another process."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from memconsole.runs.record.records import Identity

PROC = Path("/proc")


def boot_seconds() -> float:
    """Seconds since boot. Includes time asleep, if the system counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


@functools.cache
def boot_id() -> str:
    """The id of the machine's current boot."""
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"],
            capture_output=True,
            text=True,
            check=True,
            timeout=5.0,
        )
        return answer.stdout.strip()
    return "unknown"


@functools.cache
def host_name() -> str:
    return os.uname().nodename or "localhost"


def user_name() -> str:
    """The name of the user; a user id if there is no name, as in containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return f"user {os.getuid()}"


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None if there is no such process.

    Zombies count as gone. 0 if the system does not report it.
    """
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    try:
        content = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command name in parentheses may contain spaces and parentheses.
    fields = content[content.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def identify(pid: int) -> Identity | None:
    """The identity of a living process on this machine; None if there is none."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    return Identity(
        pid=pid,
        start_ticks=ticks,
        boot_id=boot_id(),
        host=host_name(),
        pid_namespace=pid_namespace(),
    )


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs, as seen from here."""
    return is_visible(identity) and start_ticks(identity.pid) == identity.start_ticks


def is_visible(identity: Identity) -> bool:
    """Whether this process can be seen from here, if it is alive."""
    return identity.boot_id == boot_id() and identity.pid_namespace in ("", pid_namespace())


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP or Ctrl-Z. False if the system does not report it."""
    try:
        content = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return False
    return content[content.rindex(b")") + 2 :].split()[0] in (b"T", b"t")


def children(pid: int) -> list[int]:
    """The child processes of a process's main thread. Empty if the system does not report them."""
    try:
        return [int(child) for child in (PROC / f"{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class ProcessHandle:
    """Waits for one process and signals it, but never another process that reuses its id.

    Uses a pidfd. Without one (other systems) the identity is checked before each signal.
    """

    def __init__(self, identity: Identity) -> None:
        """Raises `ProcessLookupError` if the process is gone or its id belongs to another one."""
        self.identity = identity
        self.descriptor: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.descriptor = os.pidfd_open(identity.pid)
        # Check after opening: from here on the pidfd and the identity mean the same process.
        if not is_alive(identity):
            self.close()
            raise ProcessLookupError(f"process {identity.pid} is gone")

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; returns False if the process is gone."""
        try:
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, number)
            elif is_alive(self.identity):
                os.kill(self.identity.pid, number)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; returns whether the process has ended."""
        if self.descriptor is None:
            deadline = time.monotonic() + seconds
            while is_alive(self.identity):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(0.05, left))
            return True
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        return bool(poller.poll(max(0, round(seconds * 1000))))

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
