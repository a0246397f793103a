"""Solving from the plan screen: f fits in one step, k pins, B and X find the largest sizes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.calibration import Receipts
from memconsole.devices.budget import budget
from memconsole.memory.answers.advice import largest_micro_batch, largest_sequence_length
from memconsole.memory.answers.solve import Faster, fit, smallest_device_fitted
from memconsole.memory.estimate import table_of
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.differences import differing
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimization import Result
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS
from memconsole.runs.read.report.measured import SETTLED_STEPS
from memconsole.tui.plan.dialogs import solving
from memconsole.tui.plan.dialogs.choices import choices_for
from memconsole.tui.plan.pricing import Priced, price
from memconsole.tui.plan.widgets.solved import Solution, solved_lines
from memconsole.tui.views.plan_view import PlanView
from memconsole.units import value_word
from tests.tui.harness import GIB, Console, screen_lines, screen_text, settle

Make = Callable[..., Console]
LARGE = plans.apply_settings(
    Plan(),
    ["model.name=gpt2-xl", "device.name=rtx-4090", "data.sequence_length=1024", "train.batch_size=8"],
)  # fmt: skip


def notice(app: Console) -> str:
    return words_of(app, "#notice")


def words_of(app: Console, part: str) -> str:
    """The words of a widget that is as wide as the screen; none if it is hidden."""
    region = app.screen.query_one(part).region
    rows = screen_lines(app)[region.y : region.bottom]
    return " ".join(" ".join(rows).split())


async def test_f_applies_the_fit_as_one_step_that_u_undoes(make_console: Make) -> None:
    app = make_console(LARGE)
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        estimate = app.plan_screen.view.estimate
        assert estimate is not None
        assert not estimate.table.fits
        await pilot.press("f")
        await settle(pilot)
        view = app.plan_screen.view
        assert view.plan == fit(LARGE, budget(LARGE, None)).plan != LARGE
        assert view.estimate is not None
        assert view.estimate.table.fits
        assert view.undo == (LARGE,)
        told = words_of(app, "#solved")
        assert "fits, time ×" in told
        assert "training unchanged" in told
        assert "faster if you allow 16-bit arithmetic" in told
        await pilot.press("u")
        await settle(pilot)
        assert app.plan_screen.view.plan == LARGE
        assert words_of(app, "#solved") == ""


async def test_f_names_every_changed_setting_in_place_of_the_help_of_another(
    make_console: Make,
) -> None:
    for size in ((80, 24), (100, 30), (160, 48)):
        app = make_console(LARGE)
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            help = app.plan_screen.view.row.help[:20]
            assert help in screen_text(app)
            await pilot.press("f")
            await settle(pilot)
            told, fitted = words_of(app, "#solved"), app.plan_screen.view.plan
            changed = differing([LARGE, fitted])
            assert {"train.batch_size", "optimize.accumulation_steps"} <= set(changed)
            for key, (before, after) in changed.items():
                label = BY_KEY[key].short if key in BY_KEY else key
                assert f"{label} {value_word(before)} → {value_word(after)}" in told, (size, key)
            assert f"{len(changed)} settings changed" in told
            assert "u undoes" in told
            assert "…" not in told
            if size != (100, 30):  # There the help gives way in part.
                assert (help in screen_text(app)) == (size == (160, 48))
            await pilot.press("down")
            await settle(pilot)
            assert words_of(app, "#solved") == ""


async def test_pinned_rows_are_marked_and_left_alone(make_console: Make) -> None:
    free = {change.key for change in fit(LARGE, budget(LARGE, None)).changes}
    key = "optimize.optimizer_offload"
    assert key in free
    row = OPTIMIZATIONS.index(BY_KEY[key])
    app = make_console(LARGE)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press(*["down"] * row, "k")
        await settle(pilot)
        assert "○*optimizer off" in screen_text(app)
        await pilot.press("f")
        await settle(pilot)
        view = app.plan_screen.view
        assert view.plan.optimize.optimizer_offload == "none"
        assert view.plan == fit(LARGE, budget(LARGE, None), frozenset({key})).plan
        await pilot.press("k")
        assert app.plan_screen.view.pinned == frozenset()
        await settle(pilot)
        assert "○*" not in screen_text(app)


async def test_f_on_what_cannot_fit_says_what_needs_most_and_changes_nothing(
    make_console: Make,
) -> None:
    plan = plans.apply_settings(
        Plan(), ["model.name=llama-3.1-8b", "device.name=rtx-3060-12gb", "train.batch_size=1"]
    )
    app = make_console(plan)
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        for row in OPTIMIZATIONS:
            if row.key in ("optimize.lora_rank", "optimize.precision"):
                app.plan_screen.view = type(app.plan_screen.view)(
                    **{**vars(app.plan_screen.view),
                       "pinned": app.plan_screen.view.pinned | {row.key}}
                )  # fmt: skip
        keep = app.plan_screen.view.pinned
        await pilot.press("f")
        await settle(pilot)
        found = fit(plan, budget(plan, None), keep)
        assert not found.fits
        assert app.plan_screen.view.plan == plan
        assert "no settings fit 11.8 GiB" in notice(app)
        assert found.floor[1] in notice(app)
        from memconsole.devices.planned import catalog_budgets

        smallest = smallest_device_fitted(plan, catalog_budgets(plan), keep)
        assert f"smallest device at the same result: {smallest or 'none of the catalog'}" in notice(
            app
        )


async def test_capital_b_and_x_take_the_largest_that_fits(make_console: Make) -> None:
    plan = plans.apply_settings(Plan(), ["model.name=gpt2", "device.name=rtx-3060-12gb"])
    app = make_console(plan)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("X")
        await settle(pilot)
        longest = app.plan_screen.view.plan.data.sequence_length
        await pilot.press("u", "B")
        await settle(pilot)
        rows = app.plan_screen.view.plan.train.batch_size
        told = words_of(app, "#solved")
        assert told.startswith("1 setting changed ─")
        assert f"micro-batch 16 → {rows:,}" in told
        assert f"largest micro-batch: {rows:,} rows, with room for the band" in told
        assert f"training changes: 16 → {rows:,} rows per step" in told
    for key, size, step in (
        ("train.batch_size", rows, 1),
        ("data.sequence_length", longest, 8),
    ):
        device = budget(plan, None)
        assert table_of(plans.replace(plan, {key: size}), device).verdict is Verdict.FITS
        beyond = plans.replace(plan, {key: size + step})
        assert size == 1024 or table_of(beyond, device).verdict is not Verdict.FITS


def test_what_a_faster_plan_changes_is_named_in_whole() -> None:
    quick = plans.apply_settings(
        LARGE, ["optimize.precision=bf16", "optimize.optimizer=adamw-8bit"]
    )
    more = Faster(results=(Result.STATE_8_BITS,), plan=quick, speedup=1.34)
    words = solving.faster_words(more, LARGE)
    assert words == "×1.3 faster if you allow 16-bit arithmetic and 8-bit optimizer state"


def test_the_model_s_positions_are_named_where_they_limit_the_length() -> None:
    small = plans.apply_settings(Plan(), ["device.name=h100-80gb", "train.batch_size=1"])
    words = solving.largest(PlanView(small), None, "data.sequence_length").words
    assert words.startswith("largest sequence length: 2,048 tokens, the model's positions; ")


def test_the_largest_sizes_are_those_of_fit_where_finished_runs_correct_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.apply_settings(
        Plan(), ["model.name=gpt2", "device.name=cpu", "train.batch_size=4"]
    )
    host = budget(plan, None)
    priced = table_of(plan, host)
    room = msgspec.structs.replace(host, usable_bytes=priced.device_bytes)
    monkeypatch.setattr("memconsole.devices.budget.budget", lambda *_: room)
    receipt = {
        "device_name": host.name, "versions": {"torch": version("torch")}, "steps": SETTLED_STEPS,
        "plan": msgspec.to_builtins(plan), "measured": {"peak_bytes": priced.peak_bytes // 2},
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "receipt.json").write_bytes(msgspec.json.encode(receipt))
    receipts = Receipts(tmp_path)
    receipts.refresh()
    monkeypatch.setattr("memconsole.tui.plan.pricing._receipts", lambda: receipts)
    for key, search in (
        ("train.batch_size", largest_micro_batch),
        ("data.sequence_length", largest_sequence_length),
    ):
        corrected = search(plan, room, lambda p, on: receipts.calibrate_table(p, table_of(p, on)))
        plain = search(plan, room)
        assert corrected is not None
        assert plain is not None
        assert corrected.size > plain.size
        found = solving.largest(PlanView(plan), None, key).plan
        assert plans.get(found, key) == corrected.size


@pytest.mark.parametrize("key", ["f", "B", "X"])
async def test_solving_waits_for_the_first_price(
    key: str, make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.apply_settings(Plan(), ["model.name=gpt2", "device.name=rtx-3060-12gb"])
    go_on = hold_pricing(monkeypatch)
    app = make_console(plan)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert app.plan_screen.view.estimate is None
        await pilot.press(key)
        assert "pricing this plan first, then" in notice(app)
        go_on.set()
        await settle(pilot)
        view = app.plan_screen.view
        assert view.plan != plan
        assert view.undo == (plan,)
        assert "changed ─" in words_of(app, "#solved")


async def test_a_plan_changed_before_its_price_is_not_solved(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = hold_pricing(monkeypatch)
    app = make_console(LARGE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("f", "right")
        changed = app.plan_screen.view.plan
        assert changed != LARGE
        go_on.set()
        await settle(pilot)
        assert app.plan_screen.view.plan == changed


def hold_pricing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Prices of the plan screen wait until the event is set."""
    go_on = threading.Event()

    def late(*arguments: Any) -> Priced:
        assert go_on.wait(30)
        return price(*arguments)

    monkeypatch.setattr("memconsole.tui.plan.priced_screen.price", late)
    return go_on


async def test_a_fitting_plan_in_its_fastest_settings_is_left_alone(make_console: Make) -> None:
    app = make_console(Plan())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("f")
        await settle(pilot)
        fitted = app.plan_screen.view.plan
        await pilot.press("f")
        await settle(pilot)
        assert app.plan_screen.view.plan == fitted
        assert "nothing to change" in notice(app)


def test_the_device_picker_says_which_devices_fit_and_which_is_the_smallest() -> None:
    choices, _ = choices_for("device", LARGE, None)
    notes = {choice.value: choice.note for choice in choices}
    assert "too small" in notes["rtx-3060-12gb"]
    assert "not for this backend" in notes["tpu-v5e"]
    fits = [name for name, note in notes.items() if "✓" in note]
    assert fits
    from memconsole.devices.planned import catalog_budgets

    budgets = catalog_budgets(LARGE)
    least = min(fits, key=lambda name: budgets[name].usable_bytes)
    assert [name for name, note in notes.items() if "smallest that fits" in note] == [least]
    assert budgets[least].usable_bytes > 30 * GIB
    broken, _ = choices_for("device", plans.replace(LARGE, {"data.source": "gone.txt"}), None)
    assert {"not priced" in c.note for c in broken if c.note.endswith("catalog")} == {True}


def test_labels_of_changed_settings_are_whole_where_values_leave_room() -> None:
    changed = plans.replace(Plan(), {"train.evaluation_train_batches": 8, "train.batch_size": 8})
    shown = solved_lines(Solution(Plan(), changed, "fits"), "u", 78, 20)
    rows = ["".join(span.text for span in line) for line in shown]
    assert any("evaluation train batches 4 → 8" in row for row in rows), rows
    assert all(len(row) <= 78 for row in rows)


async def test_a_plan_too_large_for_its_device_shows_on_how_many_it_fits(
    make_console: Make,
) -> None:
    large = plans.apply_settings(
        Plan(),
        ["model.name=llama-3.1-8b", "device.name=h100-80gb", "data.sequence_length=2048",
         "train.batch_size=8"],
    )  # fmt: skip
    for size, words in (
        ((80, 24), "fits 8 × fsdp, 4"),
        ((160, 48), "fits 8 × NVIDIA H100 SXM 80 GB with fsdp"),
    ):
        app = make_console(large)
        async with app.run_test(size=size) as pilot:
            await settle(pilot)
            shown = screen_text(app)
            assert words in shown
            assert "GiB each" in shown
            await pilot.press("f")
            await settle(pilot)
            assert "fits 8 ×" not in screen_text(app), "it fits one device after that"


async def test_a_long_search_says_how_long_it_has_taken(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def slow(view: PlanView, lookup: object) -> Solution:
        assert end.wait(60)
        return Solution(view.plan, view.plan, "found after all")

    monkeypatch.setattr(solving, "fitted", slow)
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("f")
        for _ in range(200):
            await pilot.pause(0.1)
            if re.search(r"fitting … \d+ s", notice(app)):
                break
        assert re.search(r"fitting … \d+ s", notice(app))
        end.set()
        await settle(pilot)
        assert "found after all" in notice(app)
