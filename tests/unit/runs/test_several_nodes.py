"""A job of several nodes: where their processes meet, what starts them, and how they are told to stop."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act import in_job, together
from memconsole.runs.act.in_job import JobSupervisor
from memconsole.runs.act.supervise.supervision import Supervisor
from memconsole.runs.act.together import Meeting, here, meeting, on_every_node
from memconsole.runs.act.trainer.attempt import STOPPING
from memconsole.runs.record import files
from memconsole.runs.record.records import ErrorRecord
from memconsole.runs.record.requests import Request
from memconsole.runs.record.run_store import create_run

TWO = replace(
    Plan(),
    {
        "launch.on": "slurm",
        "launch.devices_per_node": 1,
        "device.name": "cpu",
        "device.count": 2,
        "optimize.sharding": "ddp",
    },
)


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobSupervisor:
    """The supervisor of a job of two nodes, with an attempt that it has not started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in (together.NODES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    made = JobSupervisor(create_run(TWO))
    made.attempt = made.run.new_attempt()
    return made


def test_every_node_is_told_where_to_meet() -> None:
    told = meeting(2, {"MASTER_ADDR": "n1.cluster"})
    seen = here(told | {"SLURM_NODEID": "1"})
    assert seen == Meeting(2, 1, "n1.cluster", int(told["MASTER_PORT"]))
    assert seen.port > 0
    assert here({}) == Meeting(1, 0, "localhost", 0)
    assert meeting(2, {})["MASTER_ADDR"]


def test_srun_starts_the_trainer_once_on_each_node_with_the_cores_that_the_job_asked_for() -> None:
    words = on_every_node(3, ["python", "-m", "x"], {"SLURM_CPUS_PER_TASK": "8"})
    assert words[0] == "srun"
    assert words[-3:] == ["python", "-m", "x"]
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(words)
    assert "--cpus-per-task=8" in words
    assert not [w for w in on_every_node(2, ["x"], {}) if "cpus" in w]


def test_a_job_of_several_nodes_starts_srun_and_is_stopped_by_a_file(
    supervisor: JobSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(Supervisor, "_spawn", lambda self, argv: started.append(list(argv)))
    supervisor._spawn(["trainer"])
    assert started[0][0] == "srun"
    assert here(dict(in_job.os.environ) | {"SLURM_NODEID": "1"}).nodes == 2
    stop = Request(id="1", command="stop", who="me", attempt=1, time_wall=time.time())
    supervisor._act(stop)
    assert (supervisor.path / STOPPING).exists()


def test_a_signal_that_srun_tells_is_the_cause_and_not_what_others_said_then(
    supervisor: JobSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "_spawn", lambda self, argv: None)
    supervisor._spawn(["trainer"])
    error = supervisor.path / "error.json"
    for code, ended in ((137, (None, signal.SIGKILL)), (75, (75, None)), (1, (1, None))):
        record = ErrorRecord(cause="crashed", type="RuntimeError", message="lost touch")
        files.write_struct(error, record)
        monkeypatch.setattr(Supervisor, "_exit_status", lambda self, code=code: (code, None))
        assert supervisor._exit_status() == ended
        assert error.exists() == (code < 128)
