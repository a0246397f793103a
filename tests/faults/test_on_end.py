"""The user's program that is started when a run has ended, with real supervisors."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from run_story import Story

from memconsole.cli.main import cli
from memconsole.runs.act import control, waiting
from memconsole.runs.act.supervise import on_end
from memconsole.runs.read.life.liveness import settled

TELLS = """#!/bin/sh
echo "$1" > "$HOME/told"
env | grep ^MEMCONSOLE_ | sort >> "$HOME/told"
echo done > "$HOME/whole"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a place for the program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    (tmp_path / ".config" / "memconsole").mkdir(parents=True)
    return tmp_path


def install(text: str, mode: int = 0o755) -> None:
    on_end.program().write_text(text)
    on_end.program().chmod(mode)


def stopped(story: Story) -> None:
    story.start()
    story.wait_training()
    control.request(story.run, "stop", "me")
    story.wait(lambda: settled(story.run).state == "stopped")


def test_it_is_told_of_a_run_that_was_stopped(home: Path, story: Story) -> None:
    install(TELLS)
    stopped(story)
    story.wait((home / "whole").exists)
    line, *variables = (home / "told").read_text().splitlines()
    assert line.startswith(f"{story.run.name} on ")
    assert ": stopped after " in line
    assert "training loss" in line
    assert f"MEMCONSOLE_RUN={story.run.id}" in variables
    assert f"MEMCONSOLE_RUN_FOLDER={story.run.path}" in variables
    assert "MEMCONSOLE_STATE=stopped" in variables
    assert "MEMCONSOLE_ENDED_BY=stopped" in variables


def test_it_is_told_why_a_run_failed(home: Path, story: Story) -> None:
    install(TELLS)
    story.start(each_step="raise MemoryError('of the test')")
    story.wait((home / "whole").exists)
    line, *variables = (home / "told").read_text().splitlines()
    assert "failed: out of memory after" in line
    assert "MEMCONSOLE_STATE=failed" in variables
    assert "MEMCONSOLE_ENDED_BY=out_of_memory" in variables


def test_it_may_resume_the_run(home: Path, story: Story) -> None:
    """The supervisor's lock is free, and the run's record is complete, before the program is started."""
    install(
        "#!/bin/sh\nflock --nonblock --exclusive "
        '"$MEMCONSOLE_RUN_FOLDER/supervisor.lock" echo free > "$HOME/whole"\n'
    )
    stopped(story)
    story.wait((home / "whole").exists)
    story.wait(lambda: (home / "whole").read_text() == "free\n")


def test_a_program_that_takes_too_long_is_ended(
    home: Path, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(story)
    install('#!/bin/sh\necho $$ > "$HOME/pid"\nsleep 60 &\nsleep 60\n')
    monkeypatch.setattr(on_end, "MOST_SECONDS", 0.5)
    assert "ended after" in on_end.tell_end(story.run)
    number = int((home / "pid").read_text())
    assert not Path(f"/proc/{number}").exists()


def test_what_goes_wrong_is_in_the_supervisors_log(home: Path, story: Story) -> None:
    install("#!/bin/sh\necho what it says\nexit 3\n")
    stopped(story)
    story.wait(lambda: "on-end: exit code 3" in story.said())
    assert "what it says" in story.said()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [("", 0o644, "not executable"), ("no program", 0o755, "Exec format error")],
)
def test_a_file_that_is_no_program(
    home: Path, story: Story, text: str, mode: int, words: str
) -> None:
    install(text, mode)
    stopped(story)
    story.wait(lambda: words in story.said())


def test_a_wait_that_was_cancelled_is_no_end_of_a_run(home: Path, story: Story) -> None:
    install(TELLS)
    stopped(story)
    story.wait((home / "whole").exists)
    (home / "whole").unlink()
    other = Story(story.folder)
    other.start()
    other.wait_training()
    waiting.wait_for(story.run, other.run)
    story.start()
    story.wait(lambda: settled(story.run).state == "queued")
    control.request(story.run, "stop", "me")
    story.wait(lambda: settled(story.run).supervisor_pid is None)
    control.request(other.run, "stop", "me")
    story.wait((home / "whole").exists)
    assert f"MEMCONSOLE_RUN={other.run.id}" in (home / "told").read_text()


def test_nothing_is_started_for_a_run_that_lives(home: Path, story: Story) -> None:
    install(TELLS)
    story.start()
    story.wait_training()
    assert on_end.tell_end(story.run) == ""
    assert not (home / "told").exists()


def test_doctor_says_whether_it_would_be_started(home: Path) -> None:
    def said() -> str:
        lines = CliRunner().invoke(cli, ["doctor", "--no-steps"]).stdout.splitlines()
        return next(line for line in lines if line.startswith("end of a run"))

    assert "no program" in said()
    install("", 0o644)
    assert "chmod +x" in said()
    install("#!/bin/sh\n")
    assert f"starts {on_end.program()}" in said()
