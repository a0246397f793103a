"""What is asked of a run and refused at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan.plan import Plan
from memconsole.runs.act import control
from memconsole.runs.read.life.liveness import Liveness
from memconsole.runs.record import files, requests
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import Verdict


def test_a_paused_run_is_not_waited_for_to_record_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = create_run(Plan(), "held")
    (run.attempt_path(run.new_attempt()) / "paused").touch()
    lock = locks.take(run.supervisor_lock)
    try:
        done = CliRunner().invoke(cli, ["profile", "held"])
    finally:
        lock.release()
    assert isinstance(done.exception, RunError)
    assert str(done.exception) == (
        f"run {run.id} is paused; resume it first (memconsole resume {run.id})"
    )
    assert not list((run.control_path / "cmd").iterdir())


def test_a_removed_folder_of_requests_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = create_run(Plan())
    shutil.rmtree(run.control_path)
    live = Liveness("running", 1, supervisor_pid=os.getpid())
    monkeypatch.setattr(control, "liveness", lambda run: live)
    asked = [control.request(run, "stop", "me"), control.request(run, "kill", "me")]
    assert [request.id for request, _ in requests.pending(run) if request] == asked
    assert (run.control_path / "ack").is_dir()
    assert run.control_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("order", ["stop", "pause", "resume", "profile"])
def test_stopping_what_has_ended_is_done_and_other_orders_to_it_are_refused(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = create_run(Plan(), "over")
    verdict = Verdict(reason="finished", evidence="exit code 0", exit_code=0)
    path = run.attempt_path(run.new_attempt()) / "exit.json"
    files.write_struct(path, ExitRecord(verdict=verdict, time_wall=1.0))
    done = CliRunner().invoke(cli, [order, "over"])
    if order == "stop":
        assert (done.exit_code, done.output) == (0, f"{run.id} is not running: finished\n")
    else:
        assert done.exit_code != 0
