"""A run that runs out of memory goes on by itself with smaller micro-batches, and trains the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.micro_batches import half
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.ladder import next_rung, present_plan, rungs, stepped
from memconsole.runs.read.report.report import report
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.states import LIVE
from memconsole.start import start

MIB = 2**20
BACKENDS = ("torch", "jax")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for n in range(12):
        (folder / f"{n}.txt").write_text(f"the cat {n} sat on a mat while dogs ran. " * 300)
    return folder


def plan_for(backend: str, text: Path, megabytes: int | None, **changes: Any) -> Plan:
    settings = {
        "backend": backend, "data.source": str(text), "data.vocab_size": 1024,
        "model.target_params": 1_000_000, "data.sequence_length": 64, "train.batch_size": 96,
        "train.max_steps": 4, "train.sample_tokens": 0, "train.log_every": 1, "device.name": "cpu",
        "train.warmup_steps": 2, "train.learning_rate": 3e-3, "train.evaluation_batches": 2,
        "train.on_out_of_memory": "halve",
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    if megabytes is not None:
        settings["device.memory_fraction"] = megabytes * MIB / psutil.virtual_memory().total
    return replace(Plan(), settings)


def trained(plan: Plan) -> tuple[RunDirectory, RunSnapshot]:
    """Launch and wait; the run is seen as one story, never as ended in between."""
    run = start(plan, None, None)
    follower, deadline = Follower(run), time.monotonic() + 240
    while (seen := follower.poll()).state in LIVE:
        assert time.monotonic() < deadline, (seen.state, seen.facts.phase, seen.log_tail)
        time.sleep(0.05)
    return run, seen


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_too_large_is_taken_in_smaller_pieces_and_learns_the_same(
    backend: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = plan_for(backend, text, 64)
    run, seen = trained(plan)
    assert seen.state == "finished", (seen.verdict, seen.log_tail)
    taken = rungs(run)
    assert taken
    assert len(run.attempt_numbers()) == 1 + len(taken)
    present = present_plan(run)
    assert present.train.batch_size < 96
    assert present.effective_batch == plan.effective_batch == 96
    kept = run.read_plan()
    assert kept.train.batch_size == plan.train.batch_size, "what was picked stays"
    assert kept.optimize == plan.optimize
    assert any("effective batch 96 rows as before" in w for w in seen.warnings)
    made = report(run)
    assert made.ladder == taken
    assert made.plan["train"]["batch_size"] == present.train.batch_size
    assert made.memory.measured.peak_bytes is not None
    assert made.memory.estimated.peak_bytes is None, "the picked plan's price is not this one's"
    free, _ = trained(plan_for(backend, text, None))
    assert not rungs(free)
    losses = [[step.loss for step in report(r).steps] for r in (run, free)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 4


@pytest.mark.timeout(300)
def test_a_jax_step_too_large_is_taken_in_two_halves(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rung, in a limit that half of the rows are far from."""
    pytest.importorskip("jax")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run, seen = trained(plan_for("jax", text, 170, train__max_steps=2, train__evaluation_batches=1))
    assert seen.state == "finished", (seen.verdict, seen.log_tail)
    assert [(rung.batch_size, rung.accumulation_steps) for rung in rungs(run)] == [(48, 2)]
    assert len(run.attempt_numbers()) == 2
    losses = [step.loss for step in report(run).steps]
    assert losses[1] < losses[0] - 0.5


@pytest.mark.timeout(300)
def test_a_micro_batch_of_one_row_is_the_last_rung(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # The optimizer alone holds 16 MB; one row of 2,048 tokens needs far more than what is left.
    changes = {"data.sequence_length": 2048, "train.batch_size": 2, "data.vocab_size": 8192}
    plan = replace(plan_for("torch", text, 40), changes)
    run, seen = trained(plan)
    assert seen.state == "failed"
    assert seen.verdict is not None
    assert seen.verdict.reason == "out_of_memory"
    assert [rung.batch_size for rung in rungs(run)] == [1]
    assert len(run.attempt_numbers()) == 2


def test_the_effective_batch_is_kept_whatever_the_micro_batch() -> None:
    assert [half(n) for n in (16, 12, 9, 7, 2, 1)] == [8, 6, 3, 1, 1, 1]
    plan = replace(
        Plan(),
        {
            "train.batch_size": 12,
            "optimize.accumulation_steps": 3,
            "train.on_out_of_memory": "halve",
        },
    )
    seen = []
    while (rung := next_rung(plan, 1, "train")) is not None:
        plan = stepped(plan, [rung])
        assert plan.effective_batch == 36
        seen.append(plan.train.batch_size)
    assert seen == [6, 3, 1]


def test_only_what_ran_out_is_halved() -> None:
    plan = replace(
        Plan(),
        {
            "train.batch_size": 4,
            "train.evaluation_batch_size": 8,
            "train.on_out_of_memory": "halve",
        },
    )
    sizes = {
        phase: (rung.batch_size, rung.evaluation_batch_size)
        for phase in ("train", "evaluate", "preflight")
        if (rung := next_rung(plan, 1, phase)) is not None
    }
    assert sizes == {"train": (2, 8), "evaluate": (4, 4), "preflight": (2, 4)}
    for phase in ("data", "build"):
        assert next_rung(plan, 1, phase) is None
    assert next_rung(replace(plan, {"train.on_out_of_memory": "stop"}), 1, "train") is None


def test_a_ladder_and_an_optimizer_in_the_backward_pass_exclude_each_other() -> None:
    from memconsole.plan.toggles.optimizations import check_conflicts

    changes = {
        "train.on_out_of_memory": "halve",
        "optimize.optimizer_in_backward": True,
        "train.grad_clip": 0.0,
    }
    with pytest.raises(PlanError, match="on_out_of_memory = stop"):
        check_conflicts(replace(Plan(), changes))
