"""Runs that start after another run has ended, with real supervisors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_story import Story, end

from memconsole.cli.main import cli
from memconsole.runs.act import control, launch, waiting
from memconsole.runs.act.delete import delete_run
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import Liveness, liveness, settled
from memconsole.runs.read.life.newest import newest_live
from memconsole.runs.record.directory import RunError


@pytest.fixture
def first(runs_folder: Path) -> Iterator[Story]:
    """A run that trains."""
    made = Story(runs_folder)
    made.start()
    made.wait_training()
    yield made
    end(made.run)


@pytest.fixture
def second(first: Story, story: Story) -> Story:
    """A run that waits for the first one."""
    waiting.wait_for(story.run, first.run)
    story.start()
    return story


def words_of(now: Liveness) -> str:
    assert now.verdict is not None
    return now.verdict.evidence


def stop(story: Story) -> None:
    control.request(story.run, "stop", "me")
    story.wait(lambda: settled(story.run).state == "stopped")


def test_a_run_starts_once_the_run_before_it_has_ended(first: Story, second: Story) -> None:
    assert liveness(second.run).state == "queued"
    shown = Follower(second.run).poll()
    assert (shown.state, shown.facts.phase) == ("queued", "queued")
    assert shown.waits == f"starts after run {first.run.id} ({first.run.name})"
    assert shown.waits in CliRunner().invoke(cli, ["runs"]).stdout
    assert second.run.newest_attempt() is None
    assert newest_live() == first.run
    stop(first)
    second.wait_training()
    assert liveness(second.run).waits == ""


def test_a_killed_run_lets_the_next_one_start(first: Story, second: Story) -> None:
    control.request(first.run, "kill", "me")
    second.wait_training()
    assert liveness(first.run).state == "failed"


def test_a_run_whose_wait_is_cancelled_never_starts_and_can_be_resumed(
    first: Story, second: Story
) -> None:
    assert control.request(second.run, "stop", "ann") == ""
    now = settled(second.run)
    assert (now.state, now.supervisor_pid) == ("stopped", None)
    assert words_of(now) == "cancelled by ann before it began"
    stop(first)
    assert second.run.newest_attempt() is None
    waiting.stop_waiting(second.run)
    second.start()
    second.wait_training()


def test_a_waiting_run_is_not_paused_deleted_or_resumed(second: Story) -> None:
    with pytest.raises(RunError, match="it is queued"):
        control.request(second.run, "pause", "me")
    with pytest.raises(RunError, match="queued"):
        delete_run(second.run)
    with pytest.raises(RunError, match="is queued"):
        launch.resume(second.run)
    assert liveness(second.run).state == "queued"


def test_a_run_whose_waiting_supervisor_died_says_so(first: Story, second: Story) -> None:
    supervisor = liveness(second.run).supervisor_pid
    assert supervisor
    os.kill(supervisor, signal.SIGKILL)
    second.wait(lambda: liveness(second.run).state == "lost")
    found = words_of(liveness(second.run))
    assert found == f"nothing waits any more until run {first.run.id} ({first.run.name}) has ended"


def test_runs_do_not_wait_for_each_other(first: Story, second: Story) -> None:
    with pytest.raises(RunError, match="after itself"):
        waiting.wait_for(first.run, first.run)
    with pytest.raises(RunError, match=f"after run {second.run.id}, which starts after it"):
        waiting.wait_for(first.run, second.run)


def test_a_run_that_cannot_be_started_in_its_turn_says_why(first: Story, second: Story) -> None:
    second.run.attempts_path.rmdir()
    second.run.attempts_path.touch()  # no attempt can be created in a file
    stop(first)
    second.wait(lambda: settled(second.run).state == "failed")
    assert "cannot be started" in words_of(liveness(second.run))


def test_a_resumed_run_waits_too(first: Story, story: Story) -> None:
    story.start()
    story.wait_training()
    stop(story)
    waiting.wait_for(story.run, first.run)
    story.start()
    now = liveness(story.run)
    assert (now.state, now.attempt) == ("queued", 1)
    stop(first)
    story.wait_training()
    assert liveness(story.run).attempt == 2
