"""Real trainers killed at random moments, again and again, end bitwise where an uninterrupted run ends."""

from __future__ import annotations

import collections
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import warm_trainer
from warm_trainer import Death, Order

from memconsole.plan.plan import Plan
from memconsole.runs.act import launch, restart
from memconsole.runs.act.environment import trainer_environment
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import liveness, settled
from memconsole.runs.read.report.report import report
from memconsole.runs.record.checkpoints.manifest import step_of, verify
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.processes import locks
from memconsole.runs.record.processes.heartbeat import read_heartbeat
from memconsole.runs.record.run_store import create_run
from tests.training.harness.runs import plan, state_hashes

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("MEMCONSOLE_KILLS", "100"))
"""For each backend, of trainers in a process that has imported its framework already."""
LAUNCHED_KILLS = max(KILLS // 20, 1)
"""For each backend, of trainers started as a user starts them, with a supervisor."""
SETTINGS = {
    "model__target_params": 100_000,
    "train__max_steps": 500,
    "train__epochs": 10_000,
    "train__checkpoint_every": 2,
    "train__evaluate_every": 7,
    "train__sample_tokens": 0,
    "train__log_every": 5,
}
MOST = {"seconds": 2.0, "steps": 8, "bytes": 6e6, "operations": 150, "deletions": 20, "saves": 4}
"""How long a trainer lives at most, in each way of counting. A save writes 1.2 MB."""
OPERATIONS_OF_A_SAVE = 30
SHOWN_SECONDS = 5.0
"""Until the kill of a launched trainer is shown; one second on an idle machine."""


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Trainers:
    """Trainers forked from one warm process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def train(self, run: RunDirectory, death: Death | None = None) -> int:
        """The exit status of the run's next attempt; minus the signal that ended it."""
        order = Order(run=str(run.path), attempt=run.new_attempt(), death=death)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def trainers(wanted: Plan) -> Iterator[Trainers]:
    process = subprocess.Popen(
        [sys.executable, "-P", warm_trainer.__file__, wanted.backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=trainer_environment(wanted, os.environ),
        start_new_session=True,
    )
    with process:
        try:
            yield Trainers(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def some_death(chance: random.Random) -> Death:
    way = chance.choice(list(MOST))
    after = chance.uniform(0, MOST[way])
    if way == "saves":
        return Death(way, int(after), chance.randrange(OPERATIONS_OF_A_SAVE))
    return Death(way, after if way == "seconds" else int(after))


def committed(run: RunDirectory) -> int:
    found = run.committed_checkpoints()
    return step_of(found[-1]) if found else 0


def resumed_step(run: RunDirectory) -> int | None:
    """The step from which the newest attempt went on; None if it did not come so far."""
    number = run.newest_attempt()
    assert number is not None
    records = EventReader(run.attempt_path(number)).read()
    return next((one.resumed_step for one in records if isinstance(one, events.Started)), None)


def check_equal(run: RunDirectory, whole: RunDirectory) -> None:
    """Raise unless both runs ended with the same bits and the same losses, and left nothing else."""
    assert state_hashes(run) == state_hashes(whole)
    told, expected = ({s.step: s.loss for s in report(one).steps} for one in (run, whole))
    assert {step: told[step] for step in expected} == expected
    assert [verify(path) for path in run.committed_checkpoints()] == [None] * len(
        whole.committed_checkpoints()
    )
    assert sorted(os.listdir(run.checkpoints_path)) == sorted(os.listdir(whole.checkpoints_path))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_kills_at_random_moments_change_no_bit(backend: str, text: Path) -> None:
    pytest.importorskip(backend)
    began, chance = time.monotonic(), random.Random(26)
    wanted = plan(text, backend, **SETTINGS)
    done: collections.Counter[str] = collections.Counter()
    runs = 0
    with trainers(wanted) as warm:
        whole = create_run(wanted)
        assert warm.train(whole) == 0
        while done.total() < KILLS:
            run, code = create_run(wanted), -signal.SIGKILL
            runs += 1
            while code == -signal.SIGKILL:
                restart.check_checkpoint(run)
                saved = committed(run)
                death = some_death(chance) if done.total() < KILLS else None
                code = warm.train(run, death)
                assert resumed_step(run) in (saved, None), "no committed checkpoint is lost"
                if code == -signal.SIGKILL and death is not None:
                    done[death.way] += 1
                    now = liveness(run)
                    assert (now.live, now.gang_held) == (False, False)
                    Follower(run).poll()
            assert code == 0
            check_equal(run, whole)
    minutes = (time.monotonic() - began) / 60
    print(f"{backend}: {done.total()} kills of {runs} runs in {minutes:.0f} minutes: {dict(done)}")


def wait_running(run: RunDirectory, set_up: bool) -> None:
    """Until the trainer trains, or in its set-up; until the run has ended in any case."""
    deadline = time.monotonic() + 120
    while (now := liveness(run)).live:
        number = run.newest_attempt()
        beat = read_heartbeat(run.attempt_path(number)) if number else None
        trainer = locks.holder(run.trainer_lock)
        if trainer and beat is not None and (set_up or beat.phase == "train"):
            return
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def kill(run: RunDirectory, chance: random.Random) -> bool:
    """Kill the trainer of a launched run at a random moment; False if it had finished."""
    set_up = chance.random() < 0.15
    wait_running(run, set_up)
    time.sleep(chance.random() * (2.0 if set_up else 0.7))
    trainer = locks.holder(run.trainer_lock)
    if not trainer:
        return False
    os.kill(trainer, signal.SIGKILL)
    killed = time.monotonic()
    while liveness(run).live:
        assert time.monotonic() < killed + SHOWN_SECONDS
        time.sleep(0.01)
    return settled(run).state == "failed"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_kills_of_launched_trainers_are_shown_and_change_no_bit(backend: str, text: Path) -> None:
    pytest.importorskip(backend)
    chance, done = random.Random(27), 0
    wanted = plan(text, backend, **SETTINGS)
    whole = launch.launch(wanted)
    run = launch.launch(wanted)
    while done < LAUNCHED_KILLS and kill(run, chance):
        done += 1
        saved = committed(run)
        Follower(run).poll()
        launch.resume(run)
        wait_running(run, set_up=False)
        assert resumed_step(run) == saved, "no committed checkpoint is lost"
    for one in (whole, run):
        deadline = time.monotonic() + 600
        while liveness(one).live:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert settled(one).state == "finished", liveness(one)
    check_equal(run, whole)
    print(f"{backend}: {done} kills of launched trainers")
