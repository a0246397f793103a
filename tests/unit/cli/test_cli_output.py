"""Commands whose input or output is closed or cannot be written, or is not wanted any more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memconsole.cli import output
from memconsole.cli.runs import train
from memconsole.cli.runs.progress import ProgressLines
from memconsole.plan.plan import Plan
from memconsole.runs.read.follow import Follower
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run
from tests.shell import COMMAND

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
WORDS = "standard output cannot be written: No space left on device"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(Plan(), "a run")
    (made.attempt_path(made.new_attempt()) / "out.log").write_text("a line of output\n")
    return made


@pytest.mark.parametrize("arguments", [["runs"], ["report", "latest"], ["logs", "latest"], ["-h"]])
def test_a_full_disk_for_the_output_is_one_line(run: RunDirectory, arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == f"memconsole: {WORDS}\n"
    assert done.returncode == 1


def test_a_run_whose_progress_cannot_be_printed_is_said_to_go_on(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressLines, "new", lambda *ignored: ["a line"])
    with FULL.open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(output.OutputError, match=f"{WORDS}; run {run.id} goes on"):
            train.follow(run, train.Interrupts())


def test_an_interrupt_stops_the_run_before_its_progress_is_found_unprintable(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `train | tee`: ctrl+c ends both, and the next line has no reader."""
    asked: list[RunDirectory] = []
    monkeypatch.setattr(ProgressLines, "new", lambda *ignored: ["a line"])
    monkeypatch.setattr(train, "LIVE", {Follower(run).poll().state})
    monkeypatch.setattr(train, "_ask_to_stop", asked.append)
    interrupts = train.Interrupts()
    interrupts.count = 1
    with FULL.open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(output.OutputError, match=f"{WORDS}; run {run.id} is stopping"):
            train.follow(run, interrupts)
    assert asked == [run]


def test_an_error_that_is_not_of_the_output_is_not_called_one(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(*ignored: object) -> Iterator[str]:
        raise OSError(5, "Input/output error")
        yield

    monkeypatch.setattr(ProgressLines, "new", lines)
    with pytest.raises(OSError, match="Input/output error"):
        train.follow(run, train.Interrupts())


def test_a_command_is_done_if_nobody_reads_the_rest_of_its_output(run: RunDirectory) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "runs"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_the_null_device(closed: str, tmp_path: Path) -> None:
    made = tmp_path / "some.txt"
    arguments = ["data", "make", "text", str(made), "--size", "1k"]
    shell = f'exec "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *COMMAND, *arguments], capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert made.stat().st_size > 500
