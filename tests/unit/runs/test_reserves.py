"""The room that a killed run reserved is freed by the next launch; that of every other run stays."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from memconsole.plan.plan import Plan
from memconsole.runs.act import launch
from memconsole.runs.act.reserves import free_reserves
from memconsole.runs.record import files, spares
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes import identity, locks
from memconsole.runs.record.records import AttemptRecord, JobRecord
from memconsole.runs.record.run_store import create_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose supervisor and trainer were killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = create_run(Plan(), "killed")
    number = run.new_attempt()
    who = identity.identify(1)
    assert who is not None
    dead = msgspec.structs.replace(who, start_ticks=1)
    record = AttemptRecord(attempt=number, supervisor=dead, trainer=dead, started_wall=1.0)
    files.write_struct(run.attempt_path(number) / "attempt.json", record)
    run.reserve_path.write_bytes(bytes(1000))
    spares.keep(run.spares_path)
    return run


def has_reserve(run: RunDirectory) -> bool:
    assert run.reserve_path.exists() == run.spares_path.exists()
    return run.reserve_path.exists()


def test_a_launch_frees_what_a_killed_run_reserved(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: RunDirectory, mode: str) -> int:
        raise RunError("refused")

    monkeypatch.setattr(launch, "start_supervisor", refused)
    with pytest.raises(RunError, match="refused"):
        launch.launch(Plan())
    assert not has_reserve(run)
    assert run.attempt_path(1).exists()


@pytest.mark.parametrize("name", ["supervisor_lock", "trainer_lock", "resume_lock", "gang_lock"])
def test_a_run_that_a_process_holds_keeps_its_reserve(run: RunDirectory, name: str) -> None:
    take = locks.take_gang if name == "gang_lock" else locks.take
    lock = take(getattr(run, name))
    try:
        free_reserves()
        assert has_reserve(run)
    finally:
        lock.release()
    free_reserves()
    assert not has_reserve(run)


@pytest.mark.parametrize("where", ["another machine", "a cluster", "unknown"])
def test_a_run_that_may_live_elsewhere_keeps_its_reserve(run: RunDirectory, where: str) -> None:
    path = run.attempt_path(1) / "attempt.json"
    if where == "another machine":
        record = run.attempt_record(1)
        assert record is not None
        there = msgspec.structs.replace(record.supervisor, host="elsewhere", boot_id="another")
        files.write_struct(path, msgspec.structs.replace(record, supervisor=there, trainer=there))
    elif where == "a cluster":
        files.write_struct(run.job_path, JobRecord(id="7", attempts_before=0, submitted_wall=1.0))
    else:
        path.unlink()
    free_reserves()
    assert has_reserve(run)
