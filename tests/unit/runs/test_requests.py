"""What is asked of a run and refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan.plan import Plan
from memconsole.runs.record.directory import RunError, create_run
from memconsole.runs.record.processes import locks


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
