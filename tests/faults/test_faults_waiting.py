"""Runs that start after another run has ended, with real supervisors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from run_story import Story, end

from memconsole.cli.main import cli
from memconsole.plan import plan as plans
from memconsole.runs.act import control, launch, waiting
from memconsole.runs.act.delete import delete_run
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import Liveness, liveness, settled
from memconsole.runs.read.life.newest import newest_live
from memconsole.runs.record import files
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


def test_a_run_whose_turn_would_come_by_a_cancelled_one_waits_for_the_first(
    first: Story, second: Story, runs_folder: Path
) -> None:
    third = Story(runs_folder)
    waiting.wait_for(third.run, second.run)
    third.start()
    control.request(second.run, "stop", "me")
    time.sleep(2.5 * waiting.POLL_SECONDS)
    assert liveness(third.run).state == "queued"
    stop(first)
    third.wait_training()
    end(third.run)


def test_a_lost_record_of_the_wait_starts_nothing(first: Story, second: Story) -> None:
    second.run.waiting_path.unlink()
    time.sleep(2.5 * waiting.POLL_SECONDS)
    assert second.run.newest_attempt() is None
    stop(first)
    second.wait_training()


def test_a_suspended_wait_says_so(second: Story) -> None:
    pid = second.supervisor
    os.kill(pid, signal.SIGSTOP)
    second.wait(lambda: liveness(second.run).waits.endswith("its supervisor is suspended"))
    os.kill(pid, signal.SIGCONT)


def test_a_run_whose_waiting_supervisor_died_says_so(first: Story, second: Story) -> None:
    supervisor = liveness(second.run).supervisor_pid
    assert supervisor
    os.kill(supervisor, signal.SIGKILL)
    second.wait(lambda: liveness(second.run).state == "lost")
    found = words_of(liveness(second.run))
    assert found == f"nothing waits any more until run {first.run.id} ({first.run.name}) has ended"


def test_runs_do_not_wait_for_each_other(first: Story, second: Story) -> None:
    plan = first.run.read_plan()
    with pytest.raises(RunError, match="after itself"):
        waiting.check_after(plan, first.run, first.run)
    with pytest.raises(RunError, match=f"after run {second.run.id}, which starts after it"):
        waiting.check_after(plan, second.run, first.run)


def test_a_run_does_not_wait_for_what_cannot_be_seen_or_kept(first: Story) -> None:
    plan = first.run.read_plan()
    on_slurm = plans.replace(plan, {"launch.on": "slurm"})
    with pytest.raises(RunError, match="afterany"):
        waiting.check_after(on_slurm, first.run)
    checkpoint = first.run.checkpoints_path / "step-000000001"
    begun = plans.replace(plan, {"model.weights": str(checkpoint)})
    with pytest.raises(RunError, match="may have deleted its checkpoint step-000000001"):
        waiting.check_after(begun, first.run)
    about = first.run.record()
    assert about is not None
    away = msgspec.structs.replace(about, host="elsewhere")
    files.write_struct(first.run.record_path, away)
    with pytest.raises(RunError, match="of another machine, elsewhere"):
        waiting.check_after(plan, first.run)


def test_a_run_whose_plan_is_damaged_while_it_waits_says_so(first: Story, second: Story) -> None:
    second.run.plan_path.write_text("[train")
    stop(first)
    second.wait(lambda: settled(second.run).state == "failed")
    assert "not valid TOML" in words_of(liveness(second.run))


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
    now, shown = liveness(story.run), Follower(story.run).poll()
    assert (now.state, now.attempt) == ("queued", 1)
    assert (shown.stop_requested_by, shown.facts.phase) == (None, "queued")
    with pytest.raises(RunError, match="it is queued"):
        control.request(story.run, "pause", "me")
    stop(first)
    story.wait_training()
    assert liveness(story.run).attempt == 2
