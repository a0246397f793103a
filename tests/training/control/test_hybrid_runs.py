"""Whole runs in hybrid training: their phases, their records, and resuming them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memconsole.runs.read.report.report import report
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from tests.training.harness.runs import attempt, plan, state_hashes, told

SETTINGS = {
    "hybrid__mode": "aggressive",
    "hybrid__warmup_steps": 3,
    "hybrid__full_steps": 4,
    "hybrid__correct_steps": 2,
    "hybrid__snapshot_stride": 1,
    "hybrid__horizon": 4,
    "hybrid__predict_rounds": 1,
    "hybrid__confidence": 0.0,
    "hybrid__predictor": "extrapolate",
    "hybrid__memory": "compress",
    "train__max_steps": 24,
    "train__checkpoint_every": 100,
    "train__evaluate_every": 8,
}


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def trained(text: Path, backend: str, stops: tuple[str, ...]) -> RunDirectory:
    """A run that is stopped in each of some phases, and resumed."""
    run = create_run(plan(text, backend, **SETTINGS))
    for phase in stops:
        assert attempt(run, lambda now, step, phase=phase: now == phase and step > 4) == 75  # type: ignore[misc]
    assert attempt(run) == 0
    return run


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_that_is_stopped_in_every_phase_ends_as_one_that_is_not(
    backend: str, text: Path
) -> None:
    pytest.importorskip(backend)
    whole = trained(text, backend, ())
    parts = trained(text, backend, ("full", "predict", "correct"))
    assert state_hashes(parts) == state_hashes(whole)
    jumps = [told(run, events.Jump) for run in (whole, parts)]
    assert [(j.step, j.accepted, j.decrease) for j in jumps[0]] == [
        (j.step, j.accepted, j.decrease) for j in jumps[1]
    ]
    phases = {phase.phase for phase in told(whole, events.Phase)}
    assert {"warmup", "full", "predict", "correct"} <= phases
    found = report(whole)
    assert {"full", "predict", "correct"} <= set(found.memory.by_phase)
    steps = told(whole, events.Step)
    assert steps[-1].step == 24
