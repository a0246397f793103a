"""The three locks that show which processes of a run are alive.

`trainer.lock` and `supervisor.lock` are POSIX record locks. The kernel frees them when their holder
dies, even if its children are alive, and reports the holder's process id. `gang.lock` is an flock,
which forked children inherit: it is held until the last of them has ended. Processes that train
together with the trainer hold `gang-RANK.lock` in the same way.

A process loses a POSIX lock when it closes *any* descriptor of that file. So only this module opens
these files, and it never opens one that this process has locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = "qqihh" if sys.platform == "darwin" else "hhqqi0q"
"""The layout of struct flock; Apple's field order differs."""

_held: dict[tuple[int, int], int] = {}
"""(device, inode) of the POSIX locks this process holds -> the process that took them."""


NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""The errors of a file system without locks, such as some of those of clusters."""


class LockHeld(RuntimeError):
    """Another process holds the lock."""

    def __init__(self, path: Path, pid: int | None) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(f"{path.name} is held by {who}")
        self.pid = pid


@dataclass
class Lock:
    """A lock this process holds, until `release()` or its death."""

    path: Path
    descriptor: int
    key: tuple[int, int]

    def release(self) -> None:
        if self.descriptor >= 0:
            if _held.get(self.key) == os.getpid():
                del _held[self.key]
            os.close(self.descriptor)
            self.descriptor = -1


def _open(path: Path) -> tuple[int, tuple[int, int]]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    status = os.fstat(descriptor)
    return descriptor, (status.st_dev, status.st_ino)


class NoLocks(LockHeld):
    """The file system has no locks."""

    def __init__(self, path: Path, why: str) -> None:
        RuntimeError.__init__(self, f"{path.name}: this file system has no locks ({why})")
        self.pid = None


def take(path: Path, *, required: bool = True) -> Lock:
    """Take a POSIX record lock. Raises `LockHeld`, also if this process holds it already.

    Raises `NoLocks` on a file system without locks, unless they are not `required`.
    """
    holder_pid = holder(path)
    if holder_pid is not None:
        raise LockHeld(path, holder_pid)
    descriptor, key = _open(path)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _refuse(path, descriptor, error, required)
    _held[key] = os.getpid()
    return Lock(path, descriptor, key)


def holder(path: Path) -> int | None:
    """The process that holds a POSIX record lock; None if it is free. Does not affect the lock.

    0 if the holder is in a process namespace that is not visible from here.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    if _held.get((status.st_dev, status.st_ino)) == os.getpid():
        return os.getpid()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if sys.platform == "darwin":
            question = struct.pack(_LAYOUT, 0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
            _, _, pid, kind, _ = struct.unpack(_LAYOUT, answer)
        else:
            question = struct.pack(_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
            kind, _, _, _, pid = struct.unpack(_LAYOUT, answer)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def _refuse(path: Path, descriptor: int, error: OSError, required: bool) -> None:
    """Raise the error of a lock that could not be taken. Return if there are no locks and none is `required`."""
    none = error.errno in NO_LOCKS
    if none and not required:
        return
    os.close(descriptor)
    if none:
        raise NoLocks(path, os.strerror(error.errno or 0)) from None
    raise LockHeld(path, holder(path)) from None


def take_gang(path: Path, patience_seconds: float = 1.0, *, required: bool = True) -> Lock:
    """Take the lock that forked children inherit. Raises `LockHeld`, and `NoLocks` as `take` does.

    A reader that checks the lock shares it for a moment, so this retries for `patience_seconds`.
    """
    descriptor, key = _open(path)
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Lock(path, descriptor, key)
        except OSError as error:
            if error.errno in NO_LOCKS:
                _refuse(path, descriptor, error, required)
                return Lock(path, descriptor, key)
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise LockHeld(path, None) from None
            time.sleep(0.01)


def member_lock(path: Path, rank: int) -> Path:
    """The gang lock of a process that trains together with the one that holds the lock `path`."""
    return path.with_name(f"{path.stem}-{rank}{path.suffix}")


def gang_held(path: Path) -> bool:
    """Whether the trainer, a process that trains with it, or a forked child of these is alive."""
    return _gang_held(path) or any(map(_gang_held, path.parent.glob(f"{path.stem}-*{path.suffix}")))


def _gang_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return False


@dataclass(frozen=True)
class Holders:
    """Who holds a run's locks at one moment: a process id (0: not visible from here) or None."""

    supervisor: int | None
    trainer: int | None
    gang: bool


def held(run_path: Path) -> Holders:
    """Check all three locks without affecting them."""
    return Holders(
        supervisor=holder(run_path / "supervisor.lock"),
        trainer=holder(run_path / "trainer.lock"),
        gang=gang_held(run_path / "gang.lock"),
    )
