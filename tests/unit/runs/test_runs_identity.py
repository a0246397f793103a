"""Signals reach the process that was meant, or nobody; requests come from their owner, or nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from memconsole.plan.plan import Plan
from memconsole.runs.act import control
from memconsole.runs.act.supervise import daemon
from memconsole.runs.record import requests
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes import identity
from memconsole.runs.record.run_store import create_run

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return create_run(Plan())


@linux
def test_a_recycled_number_is_a_stranger(sleeper: subprocess.Popen[bytes]) -> None:
    who = identity.identify(sleeper.pid)
    assert who is not None
    assert identity.is_alive(who)
    strangers = [
        msgspec.structs.replace(who, start_ticks=who.start_ticks - 1),
        msgspec.structs.replace(who, boot_id="another boot"),
        msgspec.structs.replace(who, pid_namespace="pid:[1]"),
    ]
    for stranger in strangers:
        assert not identity.is_alive(stranger)
        with pytest.raises(ProcessLookupError):
            identity.ProcessHandle(stranger)
    assert sleeper.poll() is None
    handle = identity.ProcessHandle(who)
    assert not handle.wait(0.01)
    assert handle.signal(signal.SIGTERM)
    assert handle.wait(10)
    sleeper.wait()
    assert not handle.signal(signal.SIGTERM)
    assert identity.identify(sleeper.pid) is None
    handle.close()


@linux
def test_a_recycled_number_is_a_stranger_without_pidfd(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    who = identity.identify(sleeper.pid)
    assert who is not None
    handle = identity.ProcessHandle(who)
    monkeypatch.setattr(identity, "start_ticks", lambda pid: who.start_ticks + 5)
    assert not handle.signal(signal.SIGKILL)
    assert sleeper.poll() is None
    monkeypatch.undo()
    sleeper.kill()
    assert handle.wait(10)
    sleeper.wait()


def request(run: RunDirectory, **changes: object) -> Path:
    name = "0123456789abcdef-0123456789"
    made = {"id": name, "command": "stop", "who": "me", "attempt": 1, "time_wall": 1.0} | changes
    path = run.control_path / "cmd" / f"{name}.json"
    path.write_bytes(msgspec.json.encode(made))
    path.chmod(0o600)
    return path


def test_only_a_well_formed_file_of_the_owner_is_a_request(
    run: RunDirectory, tmp_path: Path
) -> None:
    path = request(run)
    found = requests.read_command(path)
    assert found is not None
    assert found.who == "me"
    path.chmod(0o666)
    assert requests.read_command(path) is None
    path.chmod(0o600)
    os.link(path, tmp_path / "second name")
    assert requests.read_command(path) is None
    (tmp_path / "second name").unlink()
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert requests.read_command(path) is None
    for changes in (
        {"command": "rm -rf"},
        {"extra": 1},
        {"id": "0123456789abcdef-9999999999"},
        {"attempt": "one"},
        {"who": "x" * 5000},
    ):
        path.unlink()
        assert requests.read_command(request(run, **changes)) is None
    path.unlink()
    real = tmp_path / "real.json"
    real.write_bytes(b"{}")
    path.symlink_to(real)
    assert requests.read_command(path) is None
    path.unlink()
    os.mkfifo(path, 0o600)
    assert requests.read_command(path) is None
    (run.control_path / "cmd/not-an-id.json").write_text("{}")
    assert [where for _, where in requests.pending(run)] == [path]


def test_a_run_that_does_not_live_takes_no_requests(run: RunDirectory) -> None:
    for order in ("stop", "kill"):
        with pytest.raises(RunError, match="not running"):
            control.request(run, order, "me")
    assert requests.pending(run) == []


@linux
def test_a_long_log_gives_its_head_back_and_keeps_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    with path.open("ab") as file:
        file.write(b"x" * (4 << 20) + b"the end\n")
        file.flush()
        os.fsync(file.fileno())
        freed = daemon.punch_head(path, 1 << 20)
        if not freed:
            pytest.skip("this file system cannot punch holes")
        file.write(b"after\n")
    assert freed > 2 << 20
    assert path.stat().st_size == (4 << 20) + 14
    assert path.read_bytes().endswith(b"xthe end\nafter\n")
    assert daemon.punch_head(path, 8 << 20) == 0
