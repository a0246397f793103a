"""Whole runs on two devices: one log, checkpoints for any number of devices, and processes that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from memconsole.runs.act import launch
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import settled
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.processes import locks
from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint
from tests.shell import memconsole, wait_for_step
from tests.training.harness.runs import TINY, final, plan, state_hashes, told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 24


NODES = {"backend": "jax", "launch.devices_per_node": 1}
"""JAX with a process for each of the two devices."""


def assignments(text: Path, sharding: str, **more: object) -> list[str]:
    settings = {
        **TINY,
        "data.source": str(text),
        "device.count": 2,
        "optimize.sharding": sharding,
        "train.batch_size": 2,
        "train.max_steps": STEPS,
        "train.checkpoint_every": 3,
        "train.log_every": 1,
        "train.evaluate_every": 7,
        **more,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def started(environment: dict[str, str], text: Path, sharding: str, **more: object) -> RunDirectory:
    """A run in the background."""
    name = memconsole(
        environment, "train", "--detach", *assignments(text, sharding, **more)
    ).split()[0]
    return RunDirectory(Path(environment["XDG_STATE_HOME"]) / "memconsole" / "runs" / name)


def wait_for_end(run: RunDirectory, seconds: float = 400) -> str:
    """The state in which a run has ended."""
    import time

    end = time.monotonic() + seconds
    while (now := settled(run)).live or now.supervisor_pid is not None:
        assert time.monotonic() < end, now
        time.sleep(0.2)
    return now.state


def process(run: RunDirectory, rank: int) -> psutil.Process:
    """The process of a rank."""
    for found in psutil.process_iter():
        try:
            about = found.environ()
        except psutil.Error:
            continue
        if about.get("MEMCONSOLE_RUN_ID") == run.id and about.get("RANK") == str(rank):
            return found
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.parametrize("more", [{}, NODES], ids=["torch", "jax"])
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_a_run_that_loses_processes_ends_bitwise_as_one_that_does_not(
    environment: dict[str, str], text: Path, sharding: str, more: dict[str, object]
) -> None:
    whole = started(environment, text, sharding, **more)
    assert wait_for_end(whole) == "finished"
    run = started(environment, text, sharding, **more)
    for step, rank in ((5, 1), (12, 0)):
        wait_for_step(environment, run.id, step, 300)
        os.kill(process(run, rank).pid, signal.SIGKILL)
    assert wait_for_end(run) == "finished"
    assert len(run.attempt_numbers()) == 3
    assert state_hashes(run) == state_hashes(whole)
    assert {e.step: e.loss for e in told(run, events.Step)} == {
        e.step: e.loss for e in told(whole, events.Step)
    }


def test_a_jax_process_that_hangs_does_not_hang_the_run(
    environment: dict[str, str], text: Path
) -> None:
    whole = started(environment, text, "fsdp", **NODES)
    assert wait_for_end(whole) == "finished"
    run = started(environment, text, "fsdp", **NODES)
    wait_for_step(environment, run.id, 5, 300)
    os.kill(process(run, 1).pid, signal.SIGSTOP)
    assert wait_for_end(run) == "finished"
    assert len(run.attempt_numbers()) == 2
    assert state_hashes(run) == state_hashes(whole)


def test_one_jax_process_of_eight_devices_that_is_killed_begins_again(
    environment: dict[str, str], text: Path
) -> None:
    eight = {"backend": "jax", "device.count": 8, "train.batch_size": 1}
    whole = started(environment, text, "fsdp", **eight)
    assert wait_for_end(whole) == "finished"
    run = started(environment, text, "fsdp", **eight)
    wait_for_step(environment, run.id, 5, 300)
    pid = locks.holder(run.trainer_lock)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_for_end(run) == "finished"
    assert len(run.attempt_numbers()) == 2
    assert state_hashes(run) == state_hashes(whole)


@pytest.mark.parametrize("more", [{}, NODES], ids=["torch", "jax"])
def test_a_stopped_run_goes_on_alone_and_then_again_together(
    environment: dict[str, str], text: Path, more: dict[str, object]
) -> None:
    run = started(environment, text, "fsdp", **more)
    wait_for_step(environment, run.id, 4, 300)
    memconsole(environment, "stop", run.id, "--yes")
    assert wait_for_end(run) == "stopped"
    step = final(run)["step"]
    assert 4 <= step < STEPS
    told_ = memconsole(environment, "resume", run.id, "--set", "device.count=1")
    assert "device.count 2 → 1" in told_
    wait_for_step(environment, run.id, step + 2, 300)
    memconsole(environment, "stop", run.id, "--yes", code=None)
    wait_for_end(run)
    again = ("--set", "device.count=2", "--set", "optimize.sharding=ddp")
    memconsole(environment, "resume", run.id, *again, "--set", f"train.max_steps={STEPS + 4}")
    assert wait_for_end(run) == "finished"
    losses = {e.step: e.loss for e in told(run, events.Step)}
    assert sorted(losses) == list(range(1, STEPS + 5))
    last = LoadedCheckpoint(run.committed_checkpoints()[-1])
    assert all(np.isfinite(last.tensor(name)).all() for name in last.names())


def test_two_processes_report_the_losses_of_one(
    environment: dict[str, str], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(environment, text, "fsdp")
    assert wait_for_end(found) == "finished"
    settings = {"train.batch_size": 4, "train.max_steps": STEPS, "train.log_every": 1}
    monkeypatch.setenv("XDG_STATE_HOME", environment["XDG_STATE_HOME"])
    alone = launch.launch(plan(text, **{k.replace(".", "__"): v for k, v in settings.items()}))
    assert wait_for_end(alone) == "finished"
    losses, expected = ([e.loss for e in told(run, events.Step)] for run in (found, alone))
    assert losses == pytest.approx(expected, rel=2e-4)
    assert Follower(found).poll().facts.step == STEPS
