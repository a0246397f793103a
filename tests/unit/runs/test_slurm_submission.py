"""A run as a Slurm job: its script, its submission, and the supervisor inside the job."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from memconsole.plan.jobs.on_node import check_job, on_node
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.processes import nodes
from memconsole.runs.act import control, launch
from memconsole.runs.act.slurm import options_of, place, script, submission_environment, submit
from memconsole.runs.read.life import slurm
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes.heartbeat import read_heartbeat
from memconsole.runs.record.records import ExitRecord, JobPlace
from memconsole.runs.record.requests import replies
from memconsole.runs.record.run_store import create_run

ON_SLURM = replace(Plan(), {"launch.on": "slurm", "device.name": "cpu"})


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_the_script_asks_for_what_the_plan_says_and_becomes_the_supervisor() -> None:
    plan = replace(
        ON_SLURM,
        {
            "device.name": "h100-80gb",
            "device.count": 16,
            "launch.devices_per_node": 8,
            "launch.partition": "gpu",
            "launch.time_limit": "1-00:00:00",
            "launch.save_seconds": 600,
            "launch.options": "--account=physics '--comment=two words'",
        },
    )
    run = RunDirectory(Path("/shared/my runs/100%/20260101-000000-aaaaaa"))
    lines = script(run, options_of(run, plan), "/opt/my python").splitlines()
    options = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in lines if "#SBATCH" in line]
    assert options == [
        "--job-name=memconsole-20260101-000000-aaaaaa",
        "--output=/shared/my runs/100%%/20260101-000000-aaaaaa/job.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@600",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:8",
        "--partition=gpu",
        "--time=1-00:00:00",
        "--account=physics",
        "--comment=two words",
    ]
    last = shlex.split(lines[-1])
    assert last[:2] == ["exec", "/opt/my python"]
    assert last[-2:] == ["memconsole.runs.act.in_job", str(run.path)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device.name": "auto"}, "needs the device of a node"),
        ({"device.name": "cuda:0"}, "needs the device of a node"),
        ({"launch.time_limit": "2 hours"}, "launch.time_limit"),
        ({"launch.time_limit": "5"}, "the job would save as soon as it starts"),
        ({"launch.time_limit": "0-0:6:00"}, "expected more than 360 seconds"),
        ({"launch.time_limit": "1:59:59", "launch.save_seconds": 7200}, "save_seconds = 7,200"),
        ({"device.count": 3, "launch.devices_per_node": 2}, "expected a multiple"),
        ({"launch.partition": "a b"}, "launch.partition"),
        ({"launch.options": "physics"}, "expected options of sbatch"),
        ({"launch.options": "--comment='"}, "launch.options"),
        ({"launch.options": "--mem=1G --output=x"}, "--output belongs to memconsole"),
        ({"launch.options": "-ox"}, "belongs to memconsole"),
    ],
)
def test_a_job_that_cannot_be_described_is_refused_by_the_name_of_its_setting(
    changes: dict[str, object], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        check_job(replace(ON_SLURM, changes))


@pytest.mark.parametrize("limit", ["0", "7", "6:01", "0:06:01", "1-0", "0-1:0", "0-0:6:1"])
def test_a_time_limit_that_leaves_time_to_train_is_taken_in_each_form(limit: str) -> None:
    check_job(replace(ON_SLURM, {"launch.time_limit": limit}))


@pytest.mark.parametrize(
    ("backend", "options", "asked"),
    [
        ("torch", None, ["--mem=24G"]),
        ("jax", None, ["--mem=4G"]),  # the least
        ("torch", "--mem-bind=local", ["--mem=24G", "--mem-bind=local"]),
        ("torch", "--mem-per-cpu=1G", ["--mem-per-cpu=1G"]),
        ("torch", "--mem=16G", ["--mem=16G"]),
        ("torch", "--mem=0", ["--mem=0"]),
        ("torch", "--exclusive", ["--exclusive"]),
    ],
)
def test_a_job_asks_for_the_host_memory_of_a_nodes_processes(
    backend: str, options: str | None, asked: list[str]
) -> None:
    changes = {"device.name": "h100-80gb", "device.count": 16, "launch.devices_per_node": 8}
    plan = replace(ON_SLURM, {**changes, "backend": backend, "launch.options": options})
    words = options_of(RunDirectory(Path("/r")), plan, host_bytes=2 << 30)
    assert [word for word in words if word.startswith(("--mem", "--exclusive"))] == asked


@pytest.mark.parametrize("given", ["--mem=1G", "--mem 2000", "--mem=1048576K"])
def test_less_memory_than_estimated_is_refused(given: str) -> None:
    with pytest.raises(PlanError, match=r"less than the 2\.00 GiB"):
        options_of(
            RunDirectory(Path("/r")),
            replace(ON_SLURM, {"launch.options": given}),
            host_bytes=2 << 30,
        )


def test_devices_that_do_not_fill_their_nodes_are_refused() -> None:
    plan = replace(ON_SLURM, {"device.count": 12, "launch.devices_per_node": 8})
    with pytest.raises(PlanError, match=r"a multiple of launch\.devices_per_node = 8"):
        nodes(plan)


def test_a_node_trains_on_its_own_device_what_was_priced_for_the_catalogs() -> None:
    for name, there in (("h100-80gb", "cuda:0"), ("tpu-v5e", "tpu"), ("cpu", "cpu")):
        assert on_node(replace(ON_SLURM, {"device.name": name})).device.name == there


def test_a_job_submitted_from_a_job_inherits_nothing_of_it() -> None:
    kept = {"SLURM_CONF": "/c", "SBATCH_PARTITION": "gpu", "PATH": "/bin"}
    inside = {"SLURM_JOB_ID": "3", "SLURM_MEM_PER_NODE": "9", "SBATCH_SIGNAL": "INT@1"}
    assert submission_environment(kept | inside) == kept
    assert place({"SLURM_JOB_ID": "3", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n4"}) == (
        JobPlace(id="3", restarts=2, nodes="n4")
    )
    assert place({}) is None


# Submitting and cancelling, with commands that write down how they were called


@pytest.fixture
def commands(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Slurm's commands, first in PATH; each notes its arguments in the file `called`."""
    folder = root / "bin"
    folder.mkdir()
    for name in ("sbatch", "scancel", "scontrol", "squeue"):
        tool(folder, name, "echo 41" if name == "sbatch" else "true")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "QUEUE", slurm.Queue(slurm.ask_squeue))
    return folder


def tool(folder: Path, name: str, does: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/called\n{does}\n')
    path.chmod(0o700)


def called(folder: Path) -> list[str]:
    return [line for line in (folder / "called").read_text().splitlines() if "squeue" not in line]


def test_a_launched_job_waits_and_a_stop_takes_it_out_of_the_queue(commands: Path) -> None:
    run = launch.launch(ON_SLURM)
    (line,) = called(commands)
    assert line.startswith(f"sbatch --parsable --chdir={run.path} ")
    assert line.endswith(f" {run.path}/job.sh")
    for option in options_of(run, ON_SLURM):
        assert option in line, "an argument comes before SBATCH_… of the user's environment"
    assert liveness(run).state == "queued"
    with pytest.raises(RunError, match="is queued"):
        control.request(run, "pause", "me")
    assert control.request(run, "stop", "me") == ""
    assert called(commands)[1:] == ["scancel 41"]
    now = liveness(run)
    assert now.state == "stopped"
    assert launch.resume(run) == 1
    assert liveness(run).state == "queued"


def test_a_submitted_script_asks_for_the_memory_that_was_estimated(commands: Path) -> None:
    table = {"tier": "~", "peak_bytes": 1, "device_bytes": 1, "host_bytes": 61 << 30}
    run = launch.launch(ON_SLURM, estimate=msgspec.json.encode({"table": table}))
    assert "#SBATCH --mem=92G\n" in (run.path / "job.sh").read_text()


def test_what_sbatch_refuses_leaves_no_run_and_says_why(commands: Path, root: Path) -> None:
    tool(commands, "sbatch", "echo sbatch: error: invalid partition specified: x >&2; exit 1")
    with pytest.raises(RunError, match="sbatch refuses: sbatch: error: invalid partition"):
        launch.launch(ON_SLURM)
    why = "sbatch: error: Memory specification can not be satisfied"
    tool(commands, "sbatch", f"echo {why} >&2; exit 1")
    with pytest.raises(RunError, match=f'{why}; if the cluster .* launch.options = "--mem=0"'):
        launch.launch(ON_SLURM)
    tool(commands, "sbatch", "echo welcome")
    with pytest.raises(RunError, match="without the number of a job"):
        launch.launch(ON_SLURM)
    assert list((root / "state/memconsole/runs").iterdir()) == []


def test_without_slurm_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RunError, match="there is no sbatch here"):
        submit(create_run(ON_SLURM), ON_SLURM)


# The supervisor in its job

IN_JOB = """
import sys
from memconsole.runs.act import in_job
script = sys.argv.pop(1)
sys.exit(in_job.main(command=lambda run, n: [sys.executable, "-P", script, str(run.path), str(n)]))
"""
LOOP = """
import sys, time
from pathlib import Path
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.directory import RunDirectory

with Attempt(RunDirectory(Path(sys.argv[1])), int(sys.argv[2])) as attempt:
    while not attempt.stop_requested:
        attempt.progress("train", STEP)
        time.sleep(0.01)
    attempt.finish(75, STEP, "stopped", f"step-{STEP}")
sys.exit(75)
"""


def in_job(run: RunDirectory, root: Path, step: int = 3) -> subprocess.Popen[bytes]:
    (root / "trainer.py").write_text(f"STEP = {step}\n{LOOP}")
    inside = {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "n1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", IN_JOB, str(root / "trainer.py"), str(run.path)],
        env=os.environ | inside,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while (beat := read_heartbeat(run.attempt_path(1))) is None or beat.phase != "train":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_slurms_signals_save_and_only_that_of_the_time_limit_queues_again(
    commands: Path, root: Path, number: signal.Signals, requeued: bool
) -> None:
    # A requeue that is refused lets the job end, as a cancelled job would.
    tool(commands, "scontrol", "echo scontrol: refused >&2; exit 1")
    run = create_run(ON_SLURM)
    process = in_job(run, root)
    record = run.attempt_record(1)
    assert record is not None
    assert record.job == JobPlace(id="41", restarts=1, nodes="n1")
    assert record.trainer is not None
    assert os.getsid(record.trainer.pid) == process.pid
    process.send_signal(number)
    assert process.wait(30) == 75
    asked = [answer.who for answer in replies(run)]
    assert asked == [
        "Slurm (the time limit is near)"
        if requeued
        else "Slurm (the job is cancelled or preempted)"
    ]
    end = files.read_struct(run.attempt_path(1) / "exit.json", ExitRecord)
    assert end is not None
    assert end.verdict.reason == "stopped"
    assert not end.requeues
    assert ("was not put back into the queue: " in end.verdict.evidence) == requeued
    told = called(commands) if (commands / "called").exists() else []
    assert told == (["scontrol requeue 41"] if requeued else [])


def test_a_job_whose_time_is_over_before_a_step_is_not_queued_again(
    commands: Path, root: Path
) -> None:
    run = create_run(ON_SLURM)
    process = in_job(run, root, step=0)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 75
    end = files.read_struct(run.attempt_path(1) / "exit.json", ExitRecord)
    assert end is not None
    assert not end.requeues
    assert end.verdict.evidence.endswith("raise launch.time_limit")
    assert not (commands / "called").exists()
