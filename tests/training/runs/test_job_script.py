"""The script of a job file, run by bash: it saves when its machine is taken away, and goes on when it starts again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memconsole.plan.jobs import job as jobs
from memconsole.plan.plan import Plan, replace
from tests.shell import memconsole, wait_for_step

PLAN = replace(
    Plan(),
    {
        "device.name": "cpu",
        "launch.on": "slurm",
        "model.target_params": 100_000,
        "data.vocab_size": 300,
        "data.max_examples": 20,
        "data.sequence_length": 32,
        "train.batch_size": 2,
        "train.max_steps": 400,
        "train.log_every": 1,
        "train.sample_tokens": 0,
        "train.preflight": False,
    },
)


@pytest.mark.slow
def test_a_job_that_is_taken_away_saves_and_goes_on_where_it_starts_again(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ROOT", str(tmp_path / "root"))
    script = jobs.script(jobs.Job("a-job", PLAN, ("memconsole",), 8, None), {})
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    inside = environment | {"PATH": path}
    begun = subprocess.Popen(["bash", "-c", script], env=inside, stdout=subprocess.DEVNULL)
    inside["XDG_STATE_HOME"] = f"{tmp_path}/root/state"
    found: list[Path] = []
    while not found:
        assert begun.poll() is None
        time.sleep(0.1)
        found = list(tmp_path.glob("root/state/memconsole/runs/*/attempts/0001"))
    wait_for_step(inside, found[0].parents[1].name, 20)
    begun.send_signal(signal.SIGTERM)
    assert begun.wait(60) == jobs.STOPPED
    again = subprocess.run(["bash", "-c", script], env=inside, capture_output=True, timeout=200)
    assert again.returncode == 0, again.stderr
    (run,) = json.loads(memconsole(inside, "runs", "--json"))
    assert (run["state"], run["step"], run["name"]) == ("finished", 400, "a-job")
    assert json.loads(memconsole(inside, "report", "a-job", "--json"))["attempts"] == 2
