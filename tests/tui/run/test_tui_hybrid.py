"""Hybrid training in the console: the row, its settings, and a run whose phases change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record.log import events
from memconsole.tui.draw.comparing_runs import run_rows
from memconsole.tui.draw.lines import Line
from memconsole.tui.plan.pricing import price
from memconsole.tui.plan.screen import PlanScreen
from memconsole.tui.run.figure_rows import figure_lines
from memconsole.tui.run.header import header_lines
from memconsole.tui.run.summary import summary_lines
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import Console, screen_text, settle, snapshot

MIB = 1 << 20
PLAN = plans.replace(Plan(), {"hybrid.mode": "balanced", "device.name": "cpu"})


def texts(lines: list[Line]) -> list[str]:
    return ["".join(span.text for span in line) for line in lines]


def hybrid_run(phase: str) -> RunSnapshot:
    run = snapshot(step=340)
    jump = events.Jump(
        step=339, horizon=40, scale=1.0, accepted=True, predicted_decrease=0.02, decrease=0.01,
        confidence=0.84, tried=20, kept=12, undone=1, steps_saved=340.4,
    )  # fmt: skip
    peaks = {"compile": 163 * MIB, "warmup": 160 * MIB, "full": 171 * MIB, "predict": 58 * MIB}
    facts = msgspec.structs.replace(run.facts, phase=phase, jump=jump, peaks_by_phase=peaks)
    return msgspec.structs.replace(run, plan=PLAN, facts=facts)


def view_of(phase: str) -> RunView:
    return RunView(hybrid_run(phase), prediction=price(PLAN, None).estimate)


def test_a_hybrid_run_shows_its_phase_its_jumps_and_the_memory_of_each_phase() -> None:
    view = view_of("predict")
    assert texts(header_lines(view, 80))[1].startswith(" predict  step 340/1,200")
    rows = texts(figure_lines(view, 40, 20))
    told = {row[1:17].strip(): row[17:].strip() for row in rows}
    assert told["jumps kept"] == "12 of 20 · 84% sure"
    assert told["steps saved"] == "340 · 1 undone"
    assert told["warmup"].startswith("163 MiB  (~"), "the first step compiles in the first phase"
    assert told["▸ predict"].startswith("58.0 MiB  (~")
    assert told["correct"].startswith("—  (~"), "this phase has not come yet"
    assert [name for name in told if name.startswith("▸")] == ["▸ predict"]
    (marked,) = (row for row in texts(figure_lines(view_of("full"), 40, 20)) if "▸" in row)
    assert "full" in marked


def test_the_first_figures_of_a_hybrid_run_fit_a_small_screen() -> None:
    rows = texts(figure_lines(view_of("predict"), 38, 3))
    assert [row[1:17].strip() for row in rows] == ["tokens/s", "jumps kept", "steps saved"]
    assert all(len(row) <= 38 for row in rows)


def test_the_summary_and_the_comparison_tell_jumps_and_predict_memory() -> None:
    summary = " ".join(" ".join(texts(summary_lines(view_of("predict"), 100))).split())
    assert "12 of 20 kept, 1 undone, 340 steps saved, confidence 84%" in summary
    assert "predict 58.0 MiB" in summary
    both = texts(run_rows([hybrid_run("full"), snapshot()], 100))
    (row,) = (line for line in both if line.strip().startswith("peak in predict"))
    assert row.split()[-3:] == ["58.0", "MiB", "—"]
    assert not any("predict" in line for line in texts(run_rows([snapshot(), snapshot()], 100)))


async def test_one_key_switches_hybrid_training_on_and_the_table_shows_its_phases(
    make_console: Callable[..., Console],
) -> None:
    app = make_console()
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        await pilot.press("H")
        await settle(pilot)
        screen: Any = app.screen
        assert isinstance(screen, PlanScreen)
        assert screen.view.plan.hybrid.mode == "conservative"
        assert screen.view.estimate is not None
        assert list(screen.view.estimate.table.phases) == [
            "warmup", "full", "predict", "correct", "evaluation", "checkpoint",
        ]  # fmt: skip
        text = screen_text(app)
    for words in (
        "hybrid training",
        "predict",
        "correct",
        "snapshots",
        "no gain was measured",
    ):
        assert words in text, words
