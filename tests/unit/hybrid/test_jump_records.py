"""Counts of jumps: kept, undone, and what they stand for, from the controller to reports and curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memconsole.cli.runs.progress import ProgressLines, step_line, summary
from memconsole.plan.plan import Plan
from memconsole.runs.read.report.report import report
from memconsole.runs.read.shown.jumps import jump_words
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.state.facts import RunFacts
from memconsole.runs.read.state.reduce import RunState, reduce
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.control.tally import Tally
from memconsole_trainer.loop.scalars import scalars


def jump(step: int = 50, **changes: Any) -> events.Jump:
    told: dict[str, Any] = {
        "horizon": 20, "scale": 0.5, "accepted": True, "predicted_decrease": 0.02, "decrease": 0.01,
        "confidence": 0.84, "tried": 20, "kept": 12, "undone": 1, "steps_saved": 340.0,
    }  # fmt: skip
    return events.Jump(step=step, **{**told, **changes})


def started(step: int) -> events.Started:
    return events.Started(
        attempt=1, backend="torch", versions={}, device_id="cpu", device_name="a processor",
        device_kind="cpu", memory_label="host RAM", platform_lines=(), resumed_step=step,
    )  # fmt: skip


def test_a_tally_counts_what_moved_the_weights_for_good() -> None:
    tally = Tally()
    tally.count(40.0, accepted=True)
    tally.settle()
    tally.count(10.0, accepted=True)
    tally.count(80.0, accepted=False)
    tally.count(20.0, accepted=True)
    assert (tally.tried, tally.kept, tally.undone, tally.steps_saved) == (4, 3, 0, 66.0)
    tally.undo()  # both jumps since the last one that was settled
    assert (tally.tried, tally.kept, tally.undone, tally.steps_saved) == (4, 1, 2, 36.0)
    tally.undo()
    assert tally.undone == 2


def test_the_newest_jump_holds_the_counts_of_a_resumed_run() -> None:
    state = RunState()
    for record in (jump(50), jump(90, kept=20), started(60)):
        reduce(state, record)
    assert state.jump is None, "the jump at step 90 is to be repeated"
    reduce(state, jump(70, kept=14))
    assert state.jump is not None
    assert state.jump.kept == 14


@pytest.mark.parametrize("bad", [{"kept": -1}, {"steps_saved": float("nan")}, {"tried": 1 << 63}])
def test_impossible_counts_are_left_out(bad: dict[str, Any]) -> None:
    state = RunState()
    reduce(state, jump())
    reduce(state, jump(60, **bad))
    assert state.jump == jump()
    assert state.odd == 1


def test_a_report_has_the_jumps_and_a_plain_run_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = create_run(Plan())
    writer = EventWriter(run.attempt_path(run.new_attempt()))
    writer.write(started(0))
    assert report(run).jumps is None
    writer.write(jump())
    writer.close()
    found = report(run).jumps
    assert found is not None
    assert (found.tried, found.kept, found.undone, found.steps_saved) == (20, 12, 1, 340.0)


def test_progress_lines_tell_jumps_and_not_each_change_of_phase() -> None:
    def run(phase: str) -> RunSnapshot:
        return RunSnapshot(
            id="20260101-000000-abcdef", name="a run", state="running", plan=Plan(), attempt=1,
            created_wall=0.0, facts=RunFacts(phase=phase, step=50, loss=3.0, jump=jump()),
        )  # fmt: skip

    assert "jumps 12 of 20 kept, 1 undone" in step_line(run("full"))
    assert jump_words(jump()) == "12 of 20 kept, 1 undone, 340 steps saved, confidence 84%"
    assert jump_words(jump()) in summary(run("full"))
    lines = ProgressLines()
    told = [line for phase in ("full", "predict", "restore", "correct") for line in lines.new(run(phase))]  # fmt: skip
    assert len(told) == 1


def test_tensorboard_has_curves_of_the_jumps_and_of_each_phase() -> None:
    step, found = scalars(jump(), "tokens")
    assert step == 50
    assert dict(found)["hybrid/steps_saved"] == 340.0
    memory = events.Memory(
        phase="predict", step=7, allocated_bytes=1 << 20, peak_bytes=3 << 20, reserved_bytes=None,
        device_bytes=None, device_total_bytes=None, host_bytes=None,
    )  # fmt: skip
    assert scalars(memory, "tokens") == (7, [("memory_predict/allocated_mib", 1.0), ("memory_predict/peak_mib", 3.0)])  # fmt: skip
