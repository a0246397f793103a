"""Real trainers killed at random moments, again and again, end bitwise where an uninterrupted run ends."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from memconsole.runs.act import launch
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.liveness import liveness, settled
from memconsole.runs.read.report import report
from memconsole.runs.record.directory import RunDirectory, create_run
from memconsole.runs.record.heartbeat import read_heartbeat
from memconsole.runs.record.manifest import step_of, verify
from tests.training.harness.runs import attempt, plan, state_hashes

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("MEMCONSOLE_KILLS", "100"))
"""For each backend."""
KILLS_OF_A_RUN = 10
STEPS, EVERY = 400, 5
SHOWN_SECONDS = 5.0
"""Until a kill is shown; one second on an idle machine."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        words = f"the cat {number} sat on the mat while dogs ran over green hills "
        (folder / f"{number:02d}.txt").write_text(words * 40)
    return folder


def committed(run: RunDirectory) -> int:
    found = run.committed_checkpoints()
    return step_of(found[-1]) if found else 0


def wait_running(run: RunDirectory, set_up: bool) -> None:
    """Until the trainer trains, or in its set-up; until the run has ended in any case."""
    deadline = time.monotonic() + 120
    while (now := liveness(run)).live:
        number = run.newest_attempt()
        beat = read_heartbeat(run.attempt_path(number)) if number else None
        if now.trainer_pid and beat is not None and (set_up or beat.phase == "train"):
            return
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def kill(run: RunDirectory, chance: random.Random) -> bool:
    """Kill the trainer at a random moment; False if it had finished."""
    set_up = chance.random() < 0.15
    wait_running(run, set_up)
    time.sleep(chance.random() * (2.0 if set_up else 0.7))
    now = liveness(run)
    if not now.live or not now.trainer_pid:
        return False
    os.kill(now.trainer_pid, signal.SIGKILL)
    killed = time.monotonic()
    while liveness(run).live:
        assert time.monotonic() < killed + SHOWN_SECONDS
        time.sleep(0.01)
    return settled(run).state == "failed"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_kills_at_random_moments_change_no_bit(
    backend: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = {
        "train__max_steps": STEPS,
        "train__epochs": 10_000,
        "train__checkpoint_every": EVERY,
        "train__sample_tokens": 0,
        "train__log_every": 5,
    }
    whole = create_run(plan(text, backend, **settings))
    assert attempt(whole) == 0
    expected = state_hashes(whole)
    losses = {line.step: line.loss for line in report(whole).steps}
    chance, done, runs = random.Random(26), 0, 0
    while done < KILLS:
        run = create_run(plan(text, backend, **settings))
        runs += 1
        launch.start_supervisor(run, "--start")
        for _ in range(min(KILLS_OF_A_RUN, KILLS - done)):
            if not kill(run, chance):
                break
            done += 1
            saved = committed(run)
            Follower(run).poll()
            launch.resume(run)
            wait_running(run, set_up=False)
            resumed = Follower(run).poll().facts.started
            assert resumed is not None
            assert resumed.resumed_step == saved, "no committed checkpoint is lost"
        deadline = time.monotonic() + 300
        while liveness(run).live:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert settled(run).state == "finished", liveness(run)
        assert state_hashes(run) == expected
        told = {line.step: line.loss for line in report(run).steps}
        assert {step: told[step] for step in losses} == losses
        assert [verify(path) for path in run.committed_checkpoints()] == [None, None]
        assert not list(run.checkpoints_path.glob("*.BAD"))
    print(f"{backend}: {done} kills of {runs} runs")
