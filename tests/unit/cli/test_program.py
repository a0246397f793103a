"""The part of a command that needs a framework: its output, an interrupt, and the folder it starts in."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.cli.runs import program
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run

CALLED = """
import sys, types
made = types.ModuleType("memconsole_trainer.made")
exec(sys.argv[1], made.__dict__)
sys.modules[made.__name__] = made
from memconsole_trainer import command
sys.argv = ["", "made", *sys.argv[2:]]
sys.exit(command.main())
"""
"""Runs the source of a module as the trainer's program."""
HALF = """
import signal, sys
from pathlib import Path
from memconsole_trainer.new_files import new_folder
def main():
    with new_folder(Path(sys.argv[1])) as out:
        (out / "half").touch()
        signal.raise_signal(int(sys.argv[2]))
"""
WAITING = """
import os, signal, sys, time
print("heard", flush=True)
try:
    time.sleep(0.5)  # until the command waits for the output
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1], "w").close()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return create_run(Plan(), "a run")


def called(source: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", CALLED, source, *arguments]
    return subprocess.run(command, capture_output=True, env={**os.environ, **env})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_ended_says_nothing_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    done = called(HALF, str(tmp_path / "out"), str(int(number)))
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_program_prints_every_character_whatever_the_locale() -> None:
    done = called("def main():\n    print('\\u2603')\n    return 3", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (3, "\u2603\n".encode())


def test_a_command_prints_what_its_program_prints(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So errors of standard output are those of the command: one line."""
    source = r"import sys; print('done \x1b[31m'); sys.exit(2)"
    monkeypatch.setattr(program, "program", lambda *_: [sys.executable, "-c", source])
    for words in (["sample", run.id], ["export", run.id, "x"], ["predict", run.id, "x", "y"]):
        result = CliRunner().invoke(cli, words)
        assert (result.exit_code, result.output) == (2, "done \n")


def test_an_interrupt_lets_the_program_clean_up(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = tmp_path / "cleaned"
    argv = [sys.executable, "-c", WAITING, str(cleaned)]
    monkeypatch.setattr(program, "program", lambda *_: argv)
    monkeypatch.setattr(click, "echo", lambda *_, **__: pytest.fail("half of it was printed"))
    with pytest.raises(KeyboardInterrupt):
        program.run_program("sample", run, [])
    assert cleaned.exists()


def test_interrupts_of_a_program_on_a_terminal_are_its_own(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import os, signal, sys, time\n"
        "for _ in range(2):\n"
        "    time.sleep(0.2)  # until the command waits\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "sys.exit(7)"
    )
    monkeypatch.setattr(program, "program", lambda *_: [sys.executable, "-c", source])
    assert program.run_on_terminal("chat", run, []) == 7


@pytest.mark.parametrize(
    "words", [["sample"], ["chat"], ["export", "latest", "x"], ["predict", "latest", "x", "y"]]
)
def test_a_current_folder_that_is_gone_is_said(
    words: list[str], run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = CliRunner().invoke(cli, words)
    assert isinstance(result.exception, PlanError)
    assert "the current folder is gone: change to one that exists" in str(result.exception)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "nan"), ("--top-p", "nan"), ("--temperature", "inf"), ("--top-p", "0")],
)
def test_no_token_is_drawn_with_what_is_no_number(
    option: str, value: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "program", lambda *_: pytest.fail("the program began"))
    result = CliRunner().invoke(cli, ["sample", run.id, option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_a_device_that_does_not_exist_is_refused_before_the_program_begins(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "program", lambda *_: pytest.fail("the program began"))
    for words in (["sample", run.id], ["chat", run.id], ["predict", run.id, "x", "y"]):
        result = CliRunner().invoke(cli, [*words, "--device", "gpu"])
        assert isinstance(result.exception, PlanError)
        assert 'device.name = "gpu": not one of auto, cpu' in str(result.exception)
