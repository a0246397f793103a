"""Pausing through a real supervisor: asked for by file, seen by whoever follows, undone by going on or stopping."""

from __future__ import annotations

import os
import signal
import time

import pytest
from click.testing import CliRunner
from run_story import TRAINER, Story

from memconsole.cli.main import cli
from memconsole.runs.act import control
from memconsole.runs.act.supervise.supervision import Supervisor
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import settled
from memconsole.runs.record import requests
from memconsole.runs.record.directory import RunError

PAUSING = TRAINER.replace(
    "EACH_STEP",
    """while attempt.paused:
            attempt.emit(events.Phase(phase="paused"))
            while attempt.paused:
                attempt.progress("paused", step)
                time.sleep(0.01)
            attempt.emit(events.Phase(phase="train"))""",
)


def accepted(story: Story, request: str) -> bool:
    answer = control.wait_answer(story.run, request)
    return answer is not None and answer.accepted


def test_a_run_is_paused_seen_paused_and_goes_on(story: Story) -> None:
    story.start(script=PAUSING)
    story.wait_training()
    follower = Follower(story.run)
    assert accepted(story, control.request(story.run, "pause", "me"))
    story.wait(lambda: follower.poll().facts.phase == "paused")
    seen, held = follower.poll(), story.step
    assert (seen.state, seen.pause_requested) == ("running", True)
    assert follower.status().phase == "paused"
    time.sleep(0.2)
    assert story.step == held
    assert accepted(story, control.request(story.run, "continue", "me"))
    story.wait(lambda: story.step > held)
    story.wait(lambda: not follower.poll().pause_requested)


def test_a_pause_outlives_the_supervisor_and_a_new_one_ends_it(story: Story) -> None:
    story.start(script=PAUSING)
    story.wait_training()
    assert accepted(story, control.request(story.run, "pause", "me"))
    follower = Follower(story.run)
    story.wait(lambda: follower.poll().facts.phase == "paused")
    os.kill(story.supervisor, signal.SIGKILL)
    story.wait(lambda: story.state == "unsupervised")
    held = story.step
    control.request(story.run, "continue", "me")
    story.wait(lambda: story.step > held)


def test_a_paused_run_stops_when_asked_and_its_next_attempt_is_not_paused(story: Story) -> None:
    story.start(script=PAUSING)
    story.wait_training()
    control.request(story.run, "pause", "me")
    follower = Follower(story.run)
    story.wait(lambda: follower.poll().facts.phase == "paused")
    control.request(story.run, "stop", "me")
    story.wait(lambda: settled(story.run).state == "stopped")
    story.start(script=PAUSING)
    story.wait_training()
    assert not requests.pause_asked(story.run)


def test_the_settings_of_a_living_run_do_not_change(story: Story) -> None:
    def refusal() -> str:
        wanted = ["resume", story.run.id, "--set", "train.max_steps=50"]
        done = CliRunner().invoke(cli, wanted)
        assert not done.output
        return str(done.exception)

    story.start(script=PAUSING)
    story.wait_training()
    assert "is running; attach to it, or stop it first" in refusal()
    assert accepted(story, control.request(story.run, "pause", "me"))
    assert "is paused; settings can change only after memconsole stop" in refusal()


def test_an_ended_run_cannot_be_paused(story: Story) -> None:
    story.start()
    story.wait_training()
    control.request(story.run, "stop", "me")
    story.wait(lambda: settled(story.run).state == "stopped")
    with pytest.raises(RunError, match="not running"):
        control.request(story.run, "pause", "me")


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_paused_run_stays_paused_only_if_it_continues_by_itself(
    story: Story, by_itself: bool
) -> None:
    supervisor = Supervisor(story.run, 0.01)
    supervisor.start(lambda run, attempt: ["true"])
    (supervisor.path / "paused").touch()
    supervisor.watch()
    if not by_itself:
        supervisor.close()
    later = supervisor.successor() if by_itself else Supervisor(story.run, 0.01)
    later.start(lambda run, attempt: ["true"])
    later.watch()
    later.close()
    assert requests.pause_asked(story.run) == by_itself
