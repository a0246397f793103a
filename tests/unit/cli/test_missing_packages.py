"""Without the packages of a backend a person is told what to install, and no run is made."""

import subprocess
import sys
from pathlib import Path

import pytest

from memconsole.devices.reading import Devices
from memconsole.inspection import inspection
from memconsole.memory.tracers.tracer import Tracer
from memconsole.plan.machine import packages
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.act.launch import resume
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run, list_runs
from memconsole.start import check_launch, start

PLAN = replace(Plan(), {"device.name": "cpu"})
HIDING = """
import runpy, sys
sys.modules["numpy"] = None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def without_numpy(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What ``python -m`` does with these arguments where NumPy is not installed."""
    argv = [sys.executable, "-c", HIDING, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memconsole's own dependencies only."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(packages, "installed", lambda name: False)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_no_run_is_made_without_the_packages_of_its_backend(backend: str, bare: None) -> None:
    plan = replace(PLAN, {"backend": backend})
    with pytest.raises(PlanError, match=rf"{backend}, .*numpy, .*pip install '\.\[{backend}\]'"):
        start(plan, None, Devices(devices=()))
    assert list_runs() == []


def test_a_slurm_job_has_the_packages_of_its_node(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memconsole.start.check_job", lambda plan: None)
    check_launch(replace(PLAN, {"launch.on": "slurm"}), Devices(devices=()))


def test_no_attempt_is_made_without_the_packages_of_the_backend(bare: None) -> None:
    run = create_run(PLAN)
    run.new_attempt()
    with pytest.raises(PlanError, match=r"numpy.* not installed"):
        resume(run)
    assert run.attempt_numbers() == [1]


def test_the_reader_and_the_tracer_say_what_is_missing(
    bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(PlanError, match=r"numpy.* not installed: .*'\.\[data\]'"):
        inspection("some.txt", (), lengths=False)
    heard: list[object] = []
    Tracer("jax", "a.module", lambda tracer, message: heard.append(message)).join(10.0)
    assert "flax" in str(heard[0])
    assert "'.[jax]'" in str(heard[0])


def test_making_data_says_what_is_missing(tmp_path: Path) -> None:
    request = f'{{"kind":"text","out":"{tmp_path}/a.txt","size":{{"count":10,"size_bytes":null}},"seed":0,"options":{{}}}}'
    done = without_numpy("memconsole_trainer.data.make", request)
    assert "numpy not installed" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["sample", "export", "predict"])
def test_what_uses_a_model_says_what_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run: RunDirectory = create_run(PLAN)
    done = without_numpy("memconsole_trainer.command", name, str(run.path))
    assert done.returncode == 2
    assert done.stderr.startswith("memconsole: numpy not installed: install the extra torch")
    assert done.stderr.count("\n") == 1
