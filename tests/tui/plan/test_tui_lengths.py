"""The prices of documents' lengths on the plan screen, while the length of rows is selected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memconsole.devices.budget import budget
from memconsole.memory.answers import lengths as remembered
from memconsole.memory.answers.lengths import keep_lengths, priced_lengths
from memconsole.plan import plan as plans
from memconsole.plan.data.lengths import Lengths
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS
from memconsole.tui.draw.lines import width_of
from memconsole.tui.plan.widgets.document_lengths import brief, whole
from memconsole.tui.views.plan_view import RowLengths
from memconsole.units import format_bytes
from tests.tui.harness import Console, screen_text, settle

Make = Callable[..., Console]
DOWN = OPTIMIZATIONS.index(BY_KEY["data.sequence_length"])
PLAN = plans.apply_settings(
    Plan(), ["model.name=llama-3.2-1b", "device.name=rtx-4090", "optimize.precision=bf16",
             "optimize.optimizer=adamw-8bit", "train.batch_size=1"],
)  # fmt: skip
LENGTHS = Lengths(
    kind="packed", documents=128, exact=True, p50=312, p99=2011, longest=300_000, tokenizer="made in a test",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_lengths_are_priced_where_the_length_of_rows_is_selected(
    make_console: Make, size: tuple[int, int]
) -> None:
    keep_lengths(PLAN, LENGTHS)
    found = priced_lengths(PLAN, budget(PLAN, None), LENGTHS)
    assert [price.table is None for price in found] == [False, False, True]
    app = make_console(PLAN)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        assert "2,011" not in screen_text(app)
        assert app.plan_screen.view.rows is None
        await pilot.press(*["down"] * DOWN)
        await settle(pilot)
        shown = screen_text(app)
        assert "2,011" in shown
        assert "300,000" in shown
        if size == (160, 48):
            for price in found[:2]:
                assert price.table is not None
                assert f"~{format_bytes(price.table.device_bytes)}" in shown
            assert "too long" in shown
        rows = app.plan_screen.view.rows
        assert rows is not None
        assert [p.tokens for p in rows.prices] == [312, 2011, 300_000]
        await pilot.press("2")  # other settings, other prices
        await settle(pilot)
        await pilot.press(*["up"] * (app.plan_screen.view.cursor - DOWN), *["down"] * (DOWN - app.plan_screen.view.cursor))  # fmt: skip
        await settle(pilot)
        changed = app.plan_screen.view.plan
        assert changed != PLAN
        rows = app.plan_screen.view.rows
        assert rows is not None
        assert rows.prices == priced_lengths(changed, budget(changed, None), LENGTHS)


async def test_what_was_never_measured_says_what_measures_it(make_console: Make) -> None:
    app = make_console(PLAN)
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        await pilot.press(*["down"] * DOWN)
        await settle(pilot)
        assert "memconsole plan --lengths" in screen_text(app)


async def test_other_rows_do_not_look_lengths_up(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(plan: Plan) -> Lengths | None:
        raise AssertionError("looked up")

    monkeypatch.setattr(remembered, "known_lengths", never)
    app = make_console(PLAN)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("2", "2", "5", "b")
        await settle(pilot)
        assert app.plan_screen.view.plan != PLAN


@pytest.mark.parametrize("width", [30, 40, 44, 60, 100])
def test_the_line_fits_and_always_names_the_longest(width: int) -> None:
    rows = RowLengths(LENGTHS, priced_lengths(PLAN, budget(PLAN, None), LENGTHS))
    line = brief(rows, width)
    assert width_of(line) <= width
    text = "".join(span.text for span in line)
    assert "max 300,000" in text
    assert ("p99" in text) == (width > 30)
    assert ("~" in text) == (width > 44), "bytes where there is room"
    lines = whole(rows, width, 9)
    assert len(lines) == 5
    assert all(width_of(line) <= width for line in lines[-1:])


@pytest.mark.parametrize("width", range(26, 100, 5))
def test_the_command_that_measures_lengths_is_never_cut(width: int) -> None:
    rows = RowLengths(None, ())
    for line in (brief(rows, width), whole(rows, width, 9)[-1]):
        assert width_of(line) <= width
        assert "memconsole plan --lengths" in "".join(span.text for span in line)


def test_rows_of_tokens_are_one_width() -> None:
    rows = RowLengths(
        Lengths(kind="rows", documents=9, exact=True, p50=64, p99=64, longest=64, tokenizer=""), ()
    )
    assert "every row of the file holds 64 tokens" in brief(rows, 80)[0].text
    assert len(whole(rows, 80, 9)) == 2
