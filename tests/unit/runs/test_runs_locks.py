"""Locks tell who lives, whatever closes, forks or dies."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memconsole.runs.record.processes import locks

HOLD = """
import os, sys, time
from pathlib import Path
from memconsole.runs.record.processes import locks
posix = locks.take(Path(sys.argv[1]) / "trainer.lock")
gang = locks.take_gang(Path(sys.argv[1]) / "gang.lock")
if sys.argv[2] == "fork":
    worker = os.fork()
    if worker == 0:
        os.close(1)
        time.sleep(600)
    print(worker, flush=True)
else:
    print(0, flush=True)
time.sleep(600)
"""


def start(folder: Path, how: str = "alone") -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), how], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    return process, worker


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_lock_names_its_holder_and_is_free_when_the_holder_dies(tmp_path: Path) -> None:
    assert locks.held(tmp_path) == locks.Holders(None, None, False)
    process, _ = start(tmp_path)
    assert locks.held(tmp_path) == locks.Holders(None, process.pid, True)
    with pytest.raises(locks.LockHeld, match=f"process {process.pid}"):
        locks.take(tmp_path / "trainer.lock")
    with pytest.raises(locks.LockHeld):
        locks.take_gang(tmp_path / "gang.lock", patience_seconds=0.05)
    end(process)
    assert locks.held(tmp_path) == locks.Holders(None, None, False)


def test_a_forked_worker_keeps_only_the_gang_lock(tmp_path: Path) -> None:
    process, worker = start(tmp_path, "fork")
    end(process)
    assert locks.held(tmp_path) == locks.Holders(None, None, True)
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while locks.gang_held(tmp_path / "gang.lock"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_asking_does_not_drop_a_lock_this_process_holds(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.lock"
    lock = locks.take(path)
    for _ in range(3):
        assert locks.holder(path) == os.getpid()
    with pytest.raises(locks.LockHeld):
        locks.take(path)
    ask = "import sys; from pathlib import Path; from memconsole.runs.record.processes import locks; print(locks.holder(Path(sys.argv[1])))"
    seen = subprocess.run(
        [sys.executable, "-c", ask, str(path)], capture_output=True, text=True, check=True
    )
    assert int(seen.stdout) == os.getpid()
    lock.release()
    lock.release()
    assert locks.holder(path) is None


def test_a_fork_of_the_holder_does_not_hold_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.lock"
    lock = locks.take(path)
    child = os.fork()
    if child == 0:
        os._exit(0 if locks.holder(path) == os.getppid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locks.holder(path) == os.getpid()
    lock.release()


def test_readers_that_ask_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "gang.lock"
    locks.take_gang(path).release()
    ask = (
        "import sys; from pathlib import Path; from memconsole.runs.record.processes import locks\n"
        "print('up', flush=True)\n"
        "while True: assert not locks.gang_held(Path(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-c", ask, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert not any(locks.gang_held(path) for _ in range(500))
        other.kill()
    for _ in range(20):
        locks.take_gang(path).release()


def test_a_file_system_without_locks_is_named_and_a_job_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", none)
    monkeypatch.setattr(fcntl, "flock", none)
    for take in (locks.take, locks.take_gang):
        with pytest.raises(locks.NoLocks, match=r"a\.lock: this file system has no locks"):
            take(tmp_path / "a.lock")
        lock = take(tmp_path / "a.lock", required=False)
        lock.release()
    assert not locks.gang_held(tmp_path / "a.lock")
