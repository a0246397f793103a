"""A run that goes on with other sizes: its peaks, its times and its prediction are those of the sizes that it has now."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from memconsole.calibration import Receipts
from memconsole.cli.main import cli
from memconsole.memory.estimate import estimate
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.act import launch
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.ladder import FILE, Rung, note_resized, present_plan, resized_after
from memconsole.runs.read.report.receipt import write_receipt
from memconsole.runs.read.report.report import report
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.run_store import create_run
from memconsole.tui.run.predictions import kept_estimate
from tests.unit.runs.written import started

BUDGET = Budget(
    name="a processor",
    kind="cpu",
    memory_label="host RAM",
    total_bytes=8 << 30,
    usable_bytes=6 << 30,
    why="free now",
    local=True,
)
WHOLE = replace(Plan(), {"train.batch_size": 8, "train.max_steps": 100, "device.name": "cpu"})
EVALUATION = "train.evaluation_batch_size"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose first attempt took 20 steps and a large peak."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(WHOLE)
    files.write_atomic(made.path / "estimate.json", msgspec.json.encode(estimate(WHOLE, BUDGET)))
    attempt(made, 0, range(1, 21), seconds=4.0, peak=900)
    return made


def attempt(run: RunDirectory, begins: int, steps: range, *, seconds: float, peak: int) -> None:
    number = run.new_attempt()
    writer = EventWriter(run.attempt_path(number))
    writer.write(started(number, begins))
    for step in steps:
        writer.write(
            events.Step(
                step=step,
                epoch=1,
                loss=1.0,
                learning_rate=1e-3,
                gradient_norm=1.0,
                tokens=step * 8,
                tokens_per_second=64 / seconds,
                step_seconds=seconds,
            )
        )
    writer.write(
        events.Memory(
            phase="train",
            step=steps[-1],
            allocated_bytes=peak,
            peak_bytes=peak,
            reserved_bytes=None,
            device_total_bytes=None,
            device_bytes=peak,
            host_bytes=peak,
            peak_host_bytes=peak,
        )
    )


def resized(run: RunDirectory, **changes: object) -> Plan:
    after = replace(run.read_plan(), {k.replace("__", "."): v for k, v in changes.items()})
    note_resized(run, run.read_plan(), after)
    run.write_plan(after)
    return after


def halved(run: RunDirectory, rows: int, steps: int, evaluated: int | None) -> None:
    """Record that the first attempt ran out of memory."""
    rung = Rung(
        attempt=1,
        phase="train",
        batch_size=rows,
        accumulation_steps=steps,
        evaluation_batch_size=evaluated,
        batch_size_before=8,
        accumulation_steps_before=1,
        evaluation_batch_size_before=run.read_plan().train.evaluation_batch_size,
    )
    files.write_atomic(run.path / FILE, msgspec.json.encode({"rungs": [rung]}))


def test_a_receipt_measures_the_sizes_that_the_run_has_now(run: RunDirectory) -> None:
    resized(run, device__count=2, optimize__sharding="ddp", train__batch_size=4)
    assert resized_after(run) == {1}
    attempt(run, 20, range(21, 61), seconds=1.0, peak=300)
    receipt = write_receipt(run)
    assert receipt.step_seconds == 1.0
    assert receipt.resized_at == 20
    assert receipt.by_phase == {"train": 300}
    assert receipt.estimate is None
    assert kept_estimate(run) is None
    assert len(report(run).steps) == 60, "the report shows all steps"
    receipts = Receipts(run.path.parent)
    receipts.refresh()
    (measured,) = receipts._all
    assert (measured.peak_bytes, measured.step_seconds) == (300, 1.0)


def test_steps_that_are_taken_again_with_new_sizes_count(run: RunDirectory) -> None:
    resized(run, train__evaluation_batch_size=2)
    attempt(run, 0, range(1, 21), seconds=1.0, peak=300)
    receipt = write_receipt(run)
    assert (receipt.resized_at, receipt.step_seconds) == (0, 1.0)


def test_few_steps_with_new_sizes_correct_no_estimate(run: RunDirectory) -> None:
    resized(run, train__evaluation_batch_size=2)
    attempt(run, 20, range(21, 25), seconds=1.0, peak=300)
    write_receipt(run)
    receipts = Receipts(run.path.parent)
    receipts.refresh()
    assert receipts._all == []


def test_other_changes_leave_what_was_measured(run: RunDirectory) -> None:
    resized(run, train__max_steps=200)
    assert resized_after(run) == frozenset()
    attempt(run, 20, range(21, 61), seconds=1.0, peak=300)
    receipt = write_receipt(run)
    assert receipt.by_phase == {"train": 900}
    assert receipt.estimate is not None
    assert kept_estimate(run) is not None


def test_who_follows_a_run_sees_the_plan_of_its_newest_attempt(run: RunDirectory) -> None:
    follower = Follower(run)
    assert follower.poll().plan.train.max_steps == 100
    halved(run, 2, 4, None)
    resized(run, train__max_steps=300)
    attempt(run, 20, range(21, 23), seconds=1.0, peak=300)
    plan = follower.poll().plan
    assert (plan.train.max_steps, plan.train.batch_size) == (300, 2)
    assert plan.optimize.accumulation_steps == 4
    assert Follower(run).poll().plan == plan


@pytest.mark.parametrize(
    ("planned", "halved_to", "asked", "used"),
    [(None, None, 2, 2), (8, 4, 2, 2), (8, 4, 8, 4), (None, None, None, None)],
)
def test_an_evaluation_batch_that_was_asked_for_is_used_after_a_halving(
    run: RunDirectory,
    planned: int | None,
    halved_to: int | None,
    asked: int | None,
    used: int | None,
) -> None:
    run.write_plan(replace(WHOLE, {EVALUATION: planned}))
    halved(run, 4, 2, halved_to)
    run.write_plan(replace(WHOLE, {EVALUATION: asked}))
    assert present_plan(run).train.evaluation_batch_size == used


def resume(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, assignment: str) -> Result:
    monkeypatch.setattr(launch, "resume", lambda *ignored, **options: 2)
    return CliRunner().invoke(cli, ["resume", run.id, "--set", assignment])


def test_a_larger_evaluation_batch_than_fits_is_refused(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_plan(replace(WHOLE, {EVALUATION: 8}))
    halved(run, 4, 2, 4)
    for asked in ("16", "none"):
        error = resume(run, monkeypatch, f"{EVALUATION}={asked}").exception
        assert isinstance(error, PlanError)
        assert "has halved it to 4 to fit in memory; expected at most 4" in str(error)
    assert "attempt 2" in resume(run, monkeypatch, f"{EVALUATION}=2").output
