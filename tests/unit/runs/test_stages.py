"""The stages of a run's start-up."""

from __future__ import annotations

from memconsole.runs.read.state.stages import StageMark, marked, stages_of


def test_a_stage_that_counts_stays_one_stage_and_another_begins_with_each_detail() -> None:
    marks: list[StageMark] = []
    for since, phase, detail in (
        (0.0, "reference", "16 pairs scored with the starting weights"),
        (5.0, "reference", "800 pairs scored with the starting weights"),
        (9.0, "preflight", "checkpoint"),
        (10.0, "preflight", "training step"),
    ):
        marks = marked(marks, phase, detail, since)
    found = stages_of(marks, 12.0, running=True)
    assert [(stage.detail, stage.seconds) for stage in found] == [
        ("800 pairs scored with the starting weights", 9.0),
        ("checkpoint", 1.0),
        ("training step", 2.0),
    ]
