"""`memconsole profile`: steps of a running run are recorded, and the run goes on as if they were not."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.runs.act import control, launch
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.report.report import report
from memconsole.runs.record import files, requests
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from tests.training.harness.runs import attempt, plan, state_hashes, told


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def ask(run: RunDirectory, steps: int) -> None:
    """What the supervisor leaves for its trainer."""
    number = run.newest_attempt()
    assert number is not None
    request = requests.Request(
        id="0" * 16 + "-" + "a" * 10,
        command="profile",
        who="test",
        attempt=number,
        time_wall=1.0,
        steps=steps,
    )
    files.write_struct(run.attempt_path(number) / requests.PROFILE, request)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_recorded_steps_leave_a_trace_and_change_nothing(backend: str, text: Path) -> None:
    wanted = plan(text, backend, train__max_steps=6, train__log_every=1)
    quiet, recorded = create_run(wanted), create_run(wanted)
    assert attempt(quiet) == 0
    asked = []

    def asking(phase: str, step: int) -> bool:
        if step == 3 and not asked:
            asked.append(ask(recorded, 2))
        return False

    assert attempt(recorded, asking) == 0
    assert state_hashes(recorded) == state_hashes(quiet)
    (made,) = told(recorded, events.Profile)
    assert (made.step, made.steps) == (5, 2)
    found = {Path(name).name: Path(made.folder) / name for name in made.files}
    assert set(map(str, (p.relative_to(recorded.path).parts[0] for p in found.values()))) == {"profiles"}  # fmt: skip
    name = "trace.json.gz" if backend == "torch" else "perfetto_trace.json.gz"
    trace: Any = json.loads(gzip.decompress(found[name].read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    if backend == "torch":
        assert {"aten::mm", "[memory]"} <= names
        assert "aten::" in found["operators.txt"].read_text()
    else:
        assert len(names) > 20
        assert gzip.decompress(found["memory.prof"].read_bytes())
    assert [s.step for s in told(recorded, events.Step)] == list(range(1, 7))
    measured = report(recorded).memory
    assert "profile" in measured.by_phase
    others = [size for phase, size in measured.by_phase.items() if phase != "profile"]
    assert measured.measured.peak_bytes == max(others)


def test_a_profiler_that_fails_is_told_and_the_run_goes_on(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memconsole_torch import profiling

    def broken(*arguments: Any) -> None:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(profiling.Recording, "__init__", broken)
    run = create_run(plan(text, train__max_steps=4))
    asked = []

    def asking(phase: str, step: int) -> bool:
        if step == 2 and not asked:
            asked.append(ask(run, 1))
        return False

    assert attempt(run, asking) == 0
    assert any("no profiler here" in w.message for w in told(run, events.Warning))
    assert told(run, events.Profile)[0].files == ()


def test_the_command_reaches_a_living_run_and_says_where_the_files_are(text: Path) -> None:
    run = launch.launch(plan(text, train__max_steps=100_000, train__sample_tokens=0))
    try:
        deadline = time.monotonic() + 120
        while not told(run, events.Step) and time.monotonic() < deadline:
            time.sleep(0.2)
        done = CliRunner().invoke(cli, ["profile", run.id, "--steps", "2"])
        assert done.exit_code == 0, done.output
        paths = [Path(line) for line in done.output.splitlines()]
        assert all(path.is_file() for path in paths)
        assert {"trace.json.gz", "operators.txt"} <= {path.name for path in paths}
        assert liveness(run).live
        assert not requests.stop_requests(run, 1)
    finally:
        control.request(run, "kill", "test")
        while liveness(run).live:
            time.sleep(0.1)
    refused = CliRunner().invoke(cli, ["profile", run.id])
    assert isinstance(refused.exception, RunError)
