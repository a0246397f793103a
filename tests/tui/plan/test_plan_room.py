"""The plan screen uses its room: every row and whole sentences where they fit, reasons whole everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from memconsole.cli.plans.plan_words import text as printed
from memconsole.memory.estimate import estimate, table_of
from memconsole.memory.table import Tier
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS
from memconsole.tui.draw.comparing_plans import PricedPlan, plan_rows
from memconsole.tui.draw.lines import plain
from memconsole.tui.draw.words import signed_bytes
from memconsole.tui.plan.widgets.budget_bar import budget_lines
from memconsole.tui.plan.widgets.memory_table import table_lines
from memconsole.tui.plan.widgets.plan_summary import summary_lines
from memconsole.tui.plan.widgets.toggle_detail import ToggleDetail, brief_lines, detail_lines
from memconsole.tui.plan.widgets.toggles import toggle_line
from memconsole.tui.views.plan_view import ExactState, PlanView
from memconsole.units import format_bytes
from tests.tui.harness import Console, screen_text, settle
from tests.unit.memory.cards import card

Make = Callable[..., Console]
GIB = 2**30
LEFT = 45
"""Cells of the left column at 80x24."""
RIGHT = 34


def view_of(*settings: str, usable: int = 24 * GIB) -> PlanView:
    plan = plans.apply_settings(Plan(), list(settings))
    return PlanView(plan, estimate=estimate(plan, card(usable)), stale=False)


@pytest.mark.parametrize(("size", "id"), [((100, 30), "right-detail"), ((160, 48), "left-detail")])
async def test_every_optimization_is_listed_and_described_in_whole_sentences(
    make_console: Make, size: tuple[int, int], id: str
) -> None:
    app = make_console()
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        detail = app.screen.query_one(f"#{id}", ToggleDetail)
        for row in OPTIMIZATIONS:
            assert app.plan_screen.view.row is row
            text = screen_text(app)
            assert row.short in text or row.label in text
            drawn = detail.lines(*detail.content_size)
            words = " ".join(" ".join(plain(line).split()) for line in drawn)
            assert row.help in words
            await pilot.press("down")


@pytest.mark.parametrize("phase", ["backward", "optimizer step", "evaluation"])
def test_the_seconds_of_a_tracer_are_whole_in_the_narrow_column(phase: str) -> None:
    view = view_of()
    assert view.estimate is not None
    table = msgspec.structs.replace(view.estimate.table, peak_phase=phase)
    view = replace(view, estimate=msgspec.structs.replace(view.estimate, table=table))
    for seconds in (0, 17, 240, 1234):
        waiting = replace(view, exact=ExactState(seconds=seconds))
        heading = plain(table_lines(waiting, RIGHT, 20)[0])
        assert f"{seconds} s" in heading
        assert len(heading) <= RIGHT


async def test_why_a_launch_is_refused_is_whole_at_80x24(make_console: Make) -> None:
    app = make_console(plans.apply_settings(Plan(), ["model.name=llama-3.2-1b", "device.name=cpu", "optimize.lora_rank=8"]))  # fmt: skip
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("l")
        await settle(pilot)
        shown = " ".join(screen_text(app).split())
        assert "not launched: optimize.lora_rank = 8" in shown
        assert "or ask for it: model.weights = random trains from random ones" in shown


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_why_a_value_is_not_taken_or_saves_nothing_is_never_cut(backend: str) -> None:
    view = view_of(f"backend={backend}")
    for n, row in enumerate(OPTIMIZATIONS):
        shown = replace(view, cursor=n)
        saving = shown.next_saving(row)
        if saving is None or not saving.reason:
            continue
        rows = [plain(line) for line in brief_lines(shown, LEFT, 6)]
        assert saving.reason in " ".join(" ".join(rows).split())
        assert all(len(text) <= LEFT for text in rows)


@pytest.mark.parametrize("drawn", [brief_lines, detail_lines])
def test_what_an_optimization_does_is_whole_or_ends_with_a_sign(drawn: Any) -> None:
    view = view_of()
    for n, row in enumerate(OPTIMIZATIONS):
        for height in range(3, 9):
            rows = [plain(line).strip() for line in drawn(replace(view, cursor=n), LEFT, height)]
            said = " ".join(rows)
            assert len(rows) <= height
            assert row.help in said or said.endswith("…") or row.help[:20] not in said, rows


@pytest.mark.parametrize("drawn", [brief_lines, detail_lines])
@pytest.mark.parametrize("height", [1, 2, 3])
def test_a_reason_without_room_ends_with_a_sign(drawn: Any, height: int) -> None:
    view = view_of()
    for n, row in enumerate(OPTIMIZATIONS):
        shown = replace(view, cursor=n)
        saving = shown.next_saving(row)
        if saving is None or not saving.reason or row.refusal(view.plan, kind=view.kind):
            continue
        rows = [plain(line) for line in drawn(shown, LEFT, height)]
        said = " ".join(" ".join(rows).split())
        assert len(rows) <= height
        assert all(len(text) <= LEFT for text in rows)
        assert saving.reason in said or said.endswith("…"), rows


def test_the_tier_stands_in_a_column_of_its_own() -> None:
    view = view_of()
    for width in (LEFT, 58, 70):
        for row in OPTIMIZATIONS:
            words = plain(toggle_line(view, row, width, current=False))
            assert len(words) <= width
            assert not re.search(r"[~=✓✗][−+\d]", words), words
    for width in (RIGHT, 60, 90):
        for line in table_lines(view, width, 30):
            assert len(plain(line)) <= width
            assert not re.search(r"[~=✓][−+\d]", plain(line)), plain(line)


def test_a_verdict_is_whole_in_the_narrow_column() -> None:
    roomy = view_of().estimate
    assert roomy is not None
    for usable, verdict in ((roomy.table.band_bytes[1] - 1, Verdict.TIGHT), (2**28, None)):
        view = view_of(usable=usable)
        assert view.estimate is not None
        assert verdict is None or view.estimate.table.verdict is verdict
        rows = [plain(line).strip() for line in budget_lines(view, RIGHT, 4)]
        assert view.estimate.table.words in " ".join(rows)


def test_a_model_that_is_not_here_tells_its_fix_whole_at_80x24() -> None:
    problem = (
        'model.name = "some/model": not in the local Hugging Face cache; download it with '
        "`hf download some/model`, or give the directory that holds it"
    )
    view = replace(view_of(), estimate=None, problem=problem)
    rows = " ".join(plain(line).strip() for line in table_lines(view, RIGHT, 14))
    assert problem in rows
    assert "conservative" in plain(
        toggle_line(view_of("hybrid.mode=conservative"), BY_KEY["hybrid.mode"], LEFT, current=False)
    )
    assert all("…" not in plain(line) for line in summary_lines(view_of(), LEFT, 7))


def test_the_plan_that_needs_less_is_green_whichever_it_is() -> None:
    large, small = (Plan(), plans.replace(Plan(), {"train.batch_size": 4}))
    device = card(24 * GIB)
    priced = [PricedPlan(name, p, estimate(p, device)) for name, p in (("a", large), ("b", small))]
    saved = table_of(large, device).device_bytes > table_of(small, device).device_bytes
    assert saved
    for order, arrow, column in ((priced, "→", 2), (priced[::-1], "←", 1)):
        rows = plan_rows(order[0], order[1], 100)
        line = next(line for line in rows if plain(line).startswith(" device "))
        assert arrow in plain(line)
        assert [span.role for span in line][column] == "good"
        assert line[-1].role == "good"
        assert line[3 - column].role == ""


def test_two_plans_are_said_to_be_faster_and_leaner() -> None:
    device = card(24 * GIB)
    changed = plans.replace(Plan(), {"train.batch_size": 4})
    a, b = (PricedPlan(n, p, estimate(p, device)) for n, p in (("a", Plan()), ("b", changed)))
    assert a.estimate is not None
    assert b.estimate is not None
    ratio = a.estimate.tokens_per_second / b.estimate.tokens_per_second
    saved = a.estimate.table.device_bytes - b.estimate.table.device_bytes
    assert ratio > 1.01
    words = f"faster: a, ×{ratio:.2f} · leaner: b, by {format_bytes(saved)}"
    for order in ((a, b), (b, a)):
        assert words in " ".join(plain(line).strip() for line in plan_rows(*order, 60))
    same = [plain(line).strip() for line in plan_rows(a, replace(a, name="c"), 60)]
    assert "equally fast · the same memory" in same


@pytest.mark.parametrize(
    ("why", "shown"),
    [
        ("free now", "free now"),
        ("90 % of total (device.memory_fraction)", "90 % of total"),
        ("total; free now is n/a: the driver does not tell it", "total"),
        ("usable when nothing else runs", "usable when nothing else runs"),
        ("90 % of the recommended working set", "90 % of recommended working set"),
        ("free now, less 293 MiB for PyTorch", "free now"),
    ],
)
def test_the_reason_of_what_is_usable_is_never_cut_at_80x24(why: str, shown: str) -> None:
    device = msgspec.structs.replace(card(24 * GIB), why=why)
    view = replace(view_of(), estimate=estimate(Plan(), device))
    rows = [plain(line).strip() for line in budget_lines(view, RIGHT, 4)]
    assert any(row.endswith(shown) for row in rows), rows
    assert not any("…" in row for row in rows)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.max_steps=20", "20 steps, 16 rows, lr 0.002 (auto)"),
        ("train.max_steps=200000", "200,000 steps, 16 rows, lr 0.002"),
        ("train.max_steps=1", "1 step, 16 rows, lr 0.002 (auto)"),
        ("train.epochs=1", "1 epoch, 16 rows, lr 0.002 (auto)"),
    ],
)
def test_how_long_it_trains_takes_one_row(setting: str, words: str) -> None:
    rows = [plain(line) for line in summary_lines(view_of(setting), LEFT, 7)]
    assert len(rows) == 5
    assert any(words in row for row in rows), rows


async def test_a_run_too_short_to_predict_says_so_where_it_is_toggled(make_console: Make) -> None:
    app = make_console(plans.apply_settings(Plan(), ["device.name=cpu", "train.max_steps=100"]))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("H")
        await settle(pilot)
        drawn = brief_lines(app.plan_screen.view, LEFT, 6)
        shown = " ".join(" ".join(plain(line).split()) for line in drawn)
        words = "ends before its first predict phase: 230 steps come first, the run has 100; "
        assert f"! this run {words}shorten hybrid.warmup_steps" in shown
        assert "ends before its first" in screen_text(app)


def corrected(ratio: float) -> PlanView:
    """A plan whose peak finished runs have corrected by `ratio`."""
    view = view_of("device.name=cpu", usable=2 * GIB)
    assert view.estimate is not None
    table = view.estimate.table
    changes = {name: int(getattr(table, name) * ratio) for name in ("peak_bytes", "reserved_bytes", "device_bytes")}  # fmt: skip
    table = msgspec.structs.replace(table, tier=Tier.CALIBRATED, **changes)
    return replace(view, estimate=msgspec.structs.replace(view.estimate, table=table))


@pytest.mark.parametrize("ratio", [0.3, 1.7])
def test_a_calibrated_table_adds_up_to_its_peak(ratio: float) -> None:
    view = corrected(ratio)
    assert view.estimate is not None
    table = view.estimate.table
    rows = {plain(line)[:22].strip(): plain(line)[22:].split() for line in table_lines(view, 47, 20)}  # fmt: skip
    parts = sum(c.at(table.peak_phase) for c in table.components)
    assert parts + table.correction_bytes == table.peak_bytes
    assert " ".join(rows["correction by runs"]) == (
        f"✓{signed_bytes(table.peak_bytes - parts).rjust(9)}"
    )
    assert table.correction_bytes * (ratio - 1) > 0
    assert "correction by runs" not in str(table_lines(view_of("device.name=cpu"), 47, 20))
    bar = plain(budget_lines(view, 60, 7)[1])
    filled = len(bar.strip("▕▏").rstrip("·")) / 58
    assert filled == pytest.approx(table.device_bytes / table.budget.usable_bytes, abs=1 / 58)
    assert "corrected by measured runs; the table above is not" in printed(view.plan, view.estimate)
    assert "corrected by" not in printed(view.plan, estimate(view.plan, card(GIB)))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 48)])
async def test_every_row_of_a_calibrated_and_of_a_hybrid_table_is_shown(
    make_console: Make, size: tuple[int, int]
) -> None:
    app = make_console()
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        app.plan_screen._show(replace(corrected(0.3), keys=app.plan_screen.view.keys))
        await settle(pilot)
        shown = screen_text(app)
        assert "by runs" in shown
        assert "more rows" not in shown
        await pilot.press("H")
        await settle(pilot)
        shown = screen_text(app)
        assert "snapshots" in shown
        assert "more rows" not in shown
