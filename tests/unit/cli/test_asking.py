"""Questions of commands, with and without somebody to answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan.plan import Plan
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return create_run(Plan(), "old")


@pytest.mark.parametrize(
    ("answer", "words", "stays"),
    [("", "with --yes no question is asked", True), ("n\n", "Aborted", True), ("y\n", "", False)],
)
def test_a_run_is_deleted_only_after_a_yes(
    run: RunDirectory, answer: str, words: str, stays: bool
) -> None:
    done = CliRunner().invoke(cli, ["runs", "delete", "old"], input=answer)
    assert words in done.output + str(done.exception)
    assert (done.exit_code != 0) is stays
    assert run.path.exists() is stays
