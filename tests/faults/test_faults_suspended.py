"""A supervisor or trainer that is suspended or dead is shown for what it is, and a stop ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from run_story import TRAINER, Story

from memconsole.cli.main import cli
from memconsole.runs.act import control, launch
from memconsole.runs.act.delete import delete_run
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.records import ExitRecord

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
TOGETHER = """
import signal, subprocess, sys
from pathlib import Path
leader = subprocess.Popen([sys.executable, "-P", "-c", TRAINER, *sys.argv[1:]])
member = subprocess.Popen(["sleep", "1000"])
signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in (leader, member)])
(Path(sys.argv[1]) / "attempts" / "0001" / "other").write_text(str(member.pid))
member.wait()
sys.exit(leader.wait())
"""
"""A trainer that starts two processes, of which one leads, and waits for both."""
SHOWN_SECONDS = 30
"""Shown within two seconds on an idle machine."""


def stopped(story: Story, meanwhile: Callable[[], None] = lambda: None) -> str:
    """What `memconsole stop` says, while something else happens; it must end."""
    said: list[str] = []

    def stop() -> None:
        done = CliRunner().invoke(cli, ["stop", story.run.id, "--yes"])
        said.append(done.output if done.exception is None else f"{done.output} {done.exception}")

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    meanwhile()
    thread.join(30)
    assert said, f"stop does not end; {liveness(story.run)}"
    return said[0]


def record(story: Story) -> ExitRecord | None:
    return files.read_struct(story.run.attempt_path(1) / "exit.json", ExitRecord)


def test_a_dead_trainer_is_seen_although_its_supervisor_is_suspended(story: Story) -> None:
    story.start()
    story.wait_training()
    trainer, supervisor = story.trainer, story.supervisor
    os.kill(supervisor, signal.SIGSTOP)
    story.wait(lambda: story.state == "unsupervised", SHOWN_SECONDS)
    os.kill(trainer, signal.SIGKILL)
    story.wait(lambda: story.state == "lost", SHOWN_SECONDS)
    why = liveness(story.run).verdict
    assert why is not None
    assert f"its supervisor (process {supervisor}) is suspended" in why.evidence
    assert "is not running: lost" in stopped(story)
    # Whoever wants to go on wakes the supervisor, which knows more.
    with pytest.raises(RunError, match="not running"):
        control.request(story.run, "stop", "me")
    story.wait(lambda: story.state == "failed", SHOWN_SECONDS)
    why = liveness(story.run).verdict
    assert why is not None
    assert (why.reason, why.signal) == ("killed", "SIGKILL")


@pytest.mark.parametrize("ask", ["resume", "delete"])
def test_a_suspended_supervisor_of_a_dead_trainer_is_in_nobodys_way(
    ask: str, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.start()
    story.wait_training()
    trainer = story.trainer
    os.kill(story.supervisor, signal.SIGSTOP)
    os.kill(trainer, signal.SIGKILL)
    story.wait(lambda: story.state == "lost", SHOWN_SECONDS)
    if ask == "delete":
        delete_run(story.run)
        assert not story.run.path.exists()
        return
    monkeypatch.setattr(launch, "start_supervisor", lambda run, mode: 2)
    assert launch.resume(story.run) == 2
    assert record(story) is not None


def test_a_stop_wakes_a_suspended_supervisor(story: Story) -> None:
    story.start()
    story.wait_training()
    os.kill(story.supervisor, signal.SIGSTOP)
    assert "stopped at step" in stopped(story)


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stop_ends_although_the_supervisor_goes_while_it_waits(
    fate: signal.Signals, story: Story
) -> None:
    story.start(each_step="time.sleep(0.3 if attempt.stop_requested else 0)")
    story.wait_training()
    supervisor = story.supervisor
    os.kill(supervisor, signal.SIGSTOP)

    def go() -> None:
        time.sleep(0.3)  # the request is there, served or not, and the last step is under way
        os.kill(supervisor, fate)

    assert "stopped at step" in stopped(story, go)


def test_a_suspended_trainer_is_shown_as_such_and_stops_when_asked(story: Story) -> None:
    story.start()
    story.wait_training()
    os.kill(story.trainer, signal.SIGSTOP)
    story.wait(lambda: story.state == "suspended", SHOWN_SECONDS)
    assert "suspended" in CliRunner().invoke(cli, ["runs"]).output
    assert "stopped at step" in stopped(story)
    exited = record(story)
    assert exited is not None
    assert exited.verdict.exit_code == 75


def test_a_run_with_a_suspended_process_is_suspended_and_stops(story: Story) -> None:
    story.start(script=TOGETHER.replace("TRAINER", repr(TRAINER.replace("EACH_STEP", "pass"))))
    story.wait_training()
    other = story.run.attempt_path(1) / "other"
    story.wait(other.exists)
    os.kill(int(other.read_text()), signal.SIGSTOP)
    story.wait(lambda: story.state == "suspended", SHOWN_SECONDS)
    assert "stopped at step" in stopped(story)


def test_a_suspended_trainer_whose_supervisor_is_dead_is_suspended_and_stops(
    story: Story,
) -> None:
    story.start()
    story.wait_training()
    os.kill(story.supervisor, signal.SIGKILL)
    os.kill(story.trainer, signal.SIGSTOP)
    story.wait(lambda: story.state == "suspended", SHOWN_SECONDS)
    assert "stopped at step" in stopped(story)
