"""`train.deterministic`: frameworks are told, and two runs are the same to the bit, one interrupted or not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_torch import devices
from tests.training.harness.runs import attempt, plan, state_hashes, told

YNNPACK = "--xla_cpu_experimental_ynn_fusion_type"


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_two_runs_of_one_seed_are_the_same_to_the_bit_and_of_another_are_not(
    backend: str, text: Path
) -> None:
    same = plan(text, backend, train__max_steps=8, train__deterministic=True)
    runs = [create_run(p) for p in (same, same, replace(same, {"train.seed": 43}))]
    for run in runs:
        assert attempt(run) == 0
    first, second, other = map(state_hashes, runs)
    assert first == second
    assert first != other
    losses = [[s.loss for s in told(run, events.Step)] for run in runs]
    assert losses[0] == losses[1] != losses[2]
    lines = told(runs[0], events.Started)[0].platform_lines
    assert any("Deterministic" in line for line in lines)


def test_torch_is_told_and_told_again_when_it_is_off() -> None:
    cpu = torch.device("cpu")
    devices.prepare(cpu, replace(Plan(), {"train.deterministic": True}))
    assert torch.are_deterministic_algorithms_enabled()
    devices.prepare(cpu, Plan())
    assert not torch.are_deterministic_algorithms_enabled()


def test_xla_knows_its_flag_and_a_persons_own_flags_stay() -> None:
    code = """
import os, jax
from memconsole.plan.plan import Plan, replace
from memconsole_jax import devices
plan = replace(Plan(), {"backend": "jax", "device.name": "cpu", "train.deterministic": True})
devices.prepare(plan); devices.prepare(plan)
assert jax.jit(lambda x: x + 1)(1) == 2
print(os.environ["XLA_FLAGS"])
"""
    own = {**os.environ, "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # XLA aborts on a flag it does not know
    own_flag, products, deterministic = done.stdout.split()
    assert own_flag == "--xla_cpu_enable_fast_math=false"
    assert products.startswith(f"{YNNPACK}=")
    assert deterministic == "--xla_gpu_deterministic_ops=true"


def test_a_persons_own_choice_of_xlas_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    from memconsole_jax.devices import matmul_with_eigen

    monkeypatch.setenv("XLA_FLAGS", f"{YNNPACK}=LIBRARY_FUSION_TYPE_DOT")
    matmul_with_eigen()
    assert os.environ["XLA_FLAGS"] == f"{YNNPACK}=LIBRARY_FUSION_TYPE_DOT"


def test_the_tracer_plans_with_the_same_library() -> None:
    """Its memory plan would otherwise be of other programs than those of a run."""
    pytest.importorskip("jax")
    code = """
import os
from memconsole_jax.tracing import trace_targets
trace_targets.prepare_environment()
print(os.environ["XLA_FLAGS"])
"""
    own = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
    assert done.stdout.strip() == f"{YNNPACK}=LIBRARY_FUSION_TYPE_REDUCE", done.stderr


def test_a_deterministic_run_overrides_a_persons_other_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA takes the last value of a flag."""
    pytest.importorskip("jax")
    from memconsole_jax import devices as jax_devices

    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    wanted = {"backend": "jax", "device.name": "cpu", "train.deterministic": True}
    jax_devices.prepare(replace(Plan(), wanted))
    assert os.environ["XLA_FLAGS"].endswith(" --xla_gpu_deterministic_ops=true")
