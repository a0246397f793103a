"""Detaches a process from the terminal, session and parent that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def detach(log: Path, keep: int = -1) -> None:
    """Become a daemon: double fork, own session, no terminal, output appended to `log`.

    Of the descriptors above 2 only `keep` stays open. Returns in the daemon; the calling process
    exits. The daemon and its children ignore SIGHUP.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    output = os.open(log, flags, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor != keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def adopt_descendants() -> bool:
    """Make orphaned descendants children of this process (Linux). Returns whether that worked."""
    if sys.platform != "linux":
        return False
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def outlive_signals() -> None:
    """Ignore SIGTERM and SIGINT: the supervisor ends only after its trainer.

    It installs handlers instead of SIG_IGN, because started programs would inherit SIG_IGN.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def punch_head(path: Path, keep_bytes: int) -> int:
    """Free the disk space of all but the last `keep_bytes` of a growing file. Returns bytes freed.

    The size stays and the head reads as zeros. Returns 0 if the file system cannot punch holes.
    """
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            length = (status.st_size - keep_bytes) // 4096 * 4096
            if length <= 0 or status.st_blocks * 512 <= keep_bytes:
                return 0
            import ctypes

            libc = ctypes.CDLL(None, use_errno=True)
            fallocate = libc.fallocate
            fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            if fallocate(descriptor, 0x01 | 0x02, 0, length) != 0:
                return 0
            return max(0, status.st_blocks - os.fstat(descriptor).st_blocks) * 512
        finally:
            os.close(descriptor)
    return 0
