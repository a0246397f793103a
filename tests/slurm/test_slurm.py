"""Runs as jobs of a real Slurm: they train as a run of this machine does, and survive what Slurm does."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cluster import NODES, Cluster

from memconsole.runs.act import control, family, launch
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import Liveness, liveness
from memconsole.runs.read.report.report import report
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import locks
from memconsole.runs.record.requests import replies
from memconsole.runs.record.run_store import find_run

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
SETTINGS = {
    "device.name": "cpu",
    "model.target_params": 100_000,
    "data.sequence_length": 32,
    "data.vocab_size": 300,
    "train.batch_size": 4,
    "train.max_steps": 400,
    "train.warmup_steps": 2,
    "train.checkpoint_every": 40,
    "train.log_every": 20,
    "train.evaluate_every": 200,
    "train.sample_tokens": 0,
    "train.preflight": False,
}
pytestmark = pytest.mark.timeout(400)
End = tuple[dict[str, str], list[tuple[int, float | None]]]
"""The hashes of the last weights, and the validation losses."""


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        picked = (WORDS[(number * 7 + place * place) % 6] for place in range(400))
        (folder / f"{number}.txt").write_text(" ".join(picked))
    return folder


def train(text: Path, *options: str, where: str = "slurm", backend: str = "torch") -> RunDirectory:
    """Start a run by the command, as a person does."""
    given = {**SETTINGS, "data.source": text}
    sets = [f"--set={key}={value}" for key, value in given.items()]
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "memconsole", "train", "--detach", f"--on={where}"),
            *(*sets, f"--set=backend={backend}", *options),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr
    return find_run(answer.stdout.strip())


def wait(run: RunDirectory, what: Callable[[Liveness], object], seconds: float = 200.0) -> Liveness:
    deadline = time.monotonic() + seconds
    while not what(now := liveness(run)):
        assert time.monotonic() < deadline, (now, said(run))
        time.sleep(0.2)
    return now


def said(run: RunDirectory) -> str:
    logs = [run.job_log, *run.attempts_path.glob("*/out.log")]
    return "\n".join(f"{log}:\n{log.read_text()}" for log in logs if log.exists())


def wait_step(run: RunDirectory, step: int) -> None:
    follower = Follower(run)
    wait(
        run,
        lambda now: (
            now.live and locks.holder(run.trainer_lock) and follower.poll().facts.step >= step
        ),
    )


def end(run: RunDirectory) -> End:
    last = run.committed_checkpoints()[-1]
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in last.glob("*.safetensors")
    }
    assert hashes
    return hashes, [(one.step, one.loss) for one in report(run).evaluations]


def ended_as(whole: End, run: RunDirectory) -> None:
    """The run is finished, bit for bit like a run that nothing has interrupted."""
    now = wait(run, lambda now: not now.live)
    assert now.state == "finished", (now, said(run))
    assert end(run) == whole


@pytest.fixture(scope="session")
def whole(text: Path) -> End:
    """The end of a run of this machine that nothing interrupts."""
    run = train(text, where="here")
    wait(run, lambda now: not now.live)
    return end(run)


def test_a_job_in_torch_learns_exactly_what_a_run_of_this_machine_learns(
    slurm: Cluster, text: Path, whole: End
) -> None:
    run = train(text)
    seen = wait(run, lambda now: now.state == "running")
    job = run.job()
    assert job is not None
    assert seen.job.startswith(f"Slurm job {job.id} on n")
    ended_as(whole, run)
    assert f"JobId={job.id} " in slurm.ask("scontrol", "show", "job", "-o", job.id)
    assert run.job_log.read_text() == ""


def test_a_job_in_jax_learns_exactly_what_a_run_of_this_machine_learns(
    slurm: Cluster, text: Path
) -> None:
    here = train(text, "--set=train.max_steps=100", where="here", backend="jax")
    job = train(text, "--set=train.max_steps=100", backend="jax")
    wait(here, lambda now: not now.live)
    ended_as(end(here), job)


def test_a_stopped_job_saves_and_a_resumed_one_ends_as_if_nothing_had_been(
    slurm: Cluster, text: Path, whole: End
) -> None:
    run = train(text)
    wait_step(run, 60)
    control.request(run, "stop", "a test")
    now = wait(run, lambda now: not now.live)
    assert now.state == "stopped"
    assert now.verdict is not None
    assert now.verdict.resumable
    before = run.job()
    assert launch.resume(run) == 2
    after = run.job()
    assert before is not None
    assert after is not None
    assert after.id != before.id
    ended_as(whole, run)


def test_a_cancelled_job_saves_before_slurm_kills_it(
    slurm: Cluster, text: Path, whole: End
) -> None:
    run = train(text)
    wait_step(run, 60)
    job = run.job()
    assert job is not None
    slurm.ask("scancel", job.id)
    now = wait(run, lambda now: not now.live)
    assert now.state == "stopped", (now, said(run))
    assert now.verdict is not None
    assert "asked by Slurm (the job is cancelled or preempted)" in now.verdict.evidence
    launch.resume(run)
    ended_as(whole, run)


def test_a_killed_trainer_ends_its_job_and_the_run_can_be_resumed(
    slurm: Cluster, text: Path, whole: End
) -> None:
    run = train(text)
    wait_step(run, 60)
    pid = locks.holder(run.trainer_lock)
    assert pid
    os.kill(pid, signal.SIGKILL)
    now = wait(run, lambda now: not now.live)
    assert now.state == "failed"
    assert now.verdict is not None
    assert now.verdict.signal == "SIGKILL"
    job = run.job()
    assert job is not None
    until(lambda: "JobState=FAILED" in slurm.ask("scontrol", "show", "job", "-o", job.id))
    launch.resume(run)
    ended_as(whole, run)


def test_a_controller_that_is_killed_and_starts_again_costs_no_step(
    slurm: Cluster, text: Path, whole: End
) -> None:
    run = train(text)
    wait_step(run, 60)
    slurm.kill("slurmctld")
    assert liveness(run).live
    time.sleep(2)
    slurm.start_controller()
    hurry(slurm, run)
    ended_as(whole, run)


def test_a_requeued_job_goes_on_from_its_checkpoint(slurm: Cluster, text: Path, whole: End) -> None:
    run = train(text)
    wait_step(run, 60)
    job = run.job()
    assert job is not None
    slurm.ask("scontrol", "requeue", job.id)
    wait(run, lambda now: now.state == "queued")
    hurry(slurm, run)
    ended_as(whole, run)
    record = run.attempt_record(2)
    assert record is not None
    assert record.job is not None
    assert record.job.restarts == 1


def test_before_its_time_limit_a_job_saves_and_queues_itself_again(
    slurm: Cluster, text: Path, whole: End
) -> None:
    # Slurm counts the limit in minutes, and signals up to a minute early: here at the first chance.
    run = train(text, "--set=launch.time_limit=2", "--set=launch.save_seconds=59")
    wait_step(run, 60)
    control.request(run, "pause", "a test")  # so that it does not end before
    wait(run, lambda now: now.state == "queued" and run.newest_attempt() == 1)
    asked = [answer.who for answer in replies(run) if answer.command == "stop"]
    assert asked == ["Slurm (the time limit is near)"]
    job = run.job()
    assert job is not None
    slurm.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=30")
    hurry(slurm, run)
    ended_as(whole, run)


def test_a_second_start_of_a_living_run_is_fenced_off(
    slurm: Cluster, text: Path, whole: End
) -> None:
    run = train(text)
    wait_step(run, 60)
    second = slurm.ask("sbatch", "--parsable", str(run.path / "job.sh")).strip()
    until(lambda: "RUNNING" in slurm.ask("squeue", "-h", "-j", second, "-o", "%T"))
    slurm.ask("scancel", second)
    ended_as(whole, run)
    assert run.newest_attempt() == 1


def test_a_waiting_job_is_cancelled_and_can_be_submitted_again(
    slurm: Cluster, text: Path, whole: End
) -> None:
    for node in NODES:
        slurm.ask("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        run = train(text)
        now = wait(run, lambda now: "(" in now.job)
        assert now.state == "queued"
        assert "waits in the queue" in now.job
        assert Follower(run).poll().state == "queued"
        control.request(run, "stop", "a test")
        now = wait(run, lambda now: not now.live, 20)
        assert now.state == "stopped"
        assert now.verdict is not None
        assert now.verdict.evidence.endswith("was cancelled by a test before it began")
    finally:
        for node in NODES:
            slurm.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert launch.resume(run) == 1
    ended_as(whole, run)


TWO = ("--set=device.count=2", "--set=optimize.sharding=ddp", "--set=train.batch_size=2")


@pytest.fixture(scope="session")
def whole_of_two(text: Path) -> End:
    """The end of a run of two processes of this machine."""
    run = train(text, *TWO, where="here")
    wait(run, lambda now: not now.live)
    return end(run)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two nodes are one host here, whose name may lead to no address."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_two_nodes_learn_exactly_what_two_processes_of_this_machine_learn(
    slurm: Cluster, text: Path, two_nodes: None, whole_of_two: End
) -> None:
    run = train(text, *TWO, "--set=launch.devices_per_node=1")
    wait_step(run, 60)
    record = run.attempt_record(1)
    assert record is not None
    assert record.job is not None
    assert record.job.nodes == "n[1-2]"
    control.request(run, "stop", "a test")
    now = wait(run, lambda now: not now.live)
    assert now.state == "stopped", (now, said(run))
    launch.resume(run)
    ended_as(whole_of_two, run)


def test_two_nodes_in_jax_learn_exactly_what_two_processes_of_this_machine_learn(
    slurm: Cluster, text: Path, two_nodes: None
) -> None:
    options = (*TWO, "--set=launch.devices_per_node=1", "--set=train.max_steps=200")
    here = train(text, *options, where="here", backend="jax")
    wait(here, lambda now: not now.live)
    whole = end(here)
    run = train(text, *options, backend="jax")
    wait_step(run, 60)
    control.request(run, "stop", "a test")
    now = wait(run, lambda now: not now.live)
    assert now.state == "stopped", (now, said(run))
    launch.resume(run)
    wait_step(run, 100)
    os.kill(member(run), signal.SIGKILL)
    ended_as(whole, run)
    assert run.newest_attempt() == 3


def member(run: RunDirectory) -> int:
    """The process of the second node."""
    (found,) = (
        pid
        for pid in family.members(run.id)
        if "memconsole_trainer" in " ".join(psutil.Process(pid).cmdline())
        and psutil.Process(pid).environ().get("RANK") == "1"
    )
    return found


def test_a_killed_process_of_two_nodes_makes_both_begin_again(
    slurm: Cluster, text: Path, two_nodes: None, whole_of_two: End
) -> None:
    run = train(text, *TWO, "--set=launch.devices_per_node=1")
    wait_step(run, 60)
    leader = locks.holder(run.trainer_lock)
    second = member(run)
    assert leader != second
    os.kill(second, signal.SIGKILL)
    ended_as(whole_of_two, run)
    assert run.newest_attempt() == 2
    assert run.job() is not None


def hurry(slurm: Cluster, run: RunDirectory) -> None:
    """Let a requeued job begin at once. Slurm lets it wait for two minutes."""
    job = run.job()
    assert job is not None

    def begun() -> bool:
        state = slurm.ask("squeue", "-h", "-j", job.id, "--states=all", "-o", "%T").strip()
        if state == "PENDING":
            slurm.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now")
        return state in ("RUNNING", "COMPLETED")

    until(begun)


def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.3)
