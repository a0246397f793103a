"""The plan screen: what a key press changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from memconsole.plan import plan as plans
from memconsole.plan.data.paths import load
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS, with_value
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import locks
from memconsole.runs.record.run_store import create_run
from memconsole.tui.app.messages import Launched
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.run.screen import RunScreen
from memconsole.tui.screens.base import HELD_SECONDS
from memconsole.tui.screens.command import command_of
from memconsole.tui.screens.pick import Choice, PickScreen, matching
from memconsole.tui.screens.prompt import PromptScreen
from memconsole.tui.views.plan_view import PlanView
from tests.tui.harness import Console, paste, readings, screen_text, settle

Make = Callable[..., Console]
BIG = plans.apply_settings(
    Plan(), ["model.name=gpt2-xl", "device.name=rtx-3060-12gb", "data.sequence_length=1024"]
)


async def test_the_default_plan_is_priced_and_fits(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        text = screen_text(app)
    for words in ("stories", "python-stdlib", "peak: ", "allocated", "reserved", "between", "optim. state", "fits, ", " free",
                  "tokens/s", "min/epoch", "l launch"):  # fmt: skip
        assert words in text


async def test_one_key_toggles_and_the_table_changes(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        before = app.plan_screen.view
        await pilot.press(KeyTable().toggle_key("optimize.gradient_checkpointing"))
        await settle(pilot)
        after = app.plan_screen.view
        text = screen_text(app)
    assert before.estimate is not None
    assert after.estimate is not None
    assert after.plan.optimize.gradient_checkpointing == "selective"
    assert after.estimate.table.peak_bytes < before.estimate.table.peak_bytes
    assert after.estimate.step_seconds != before.estimate.step_seconds
    assert "selective" in text
    assert "−" in text, "the ± column shows what the change saved"
    assert not after.stale


async def test_each_optimization_is_stepped_by_its_own_key(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        for row in OPTIMIZATIONS:
            plan = app.plan_screen.view.plan
            wanted = app.plan_screen.view.next_value(row)
            await pilot.press(KeyTable().toggle_key(row.key))
            assert app.plan_screen.view.row is row
            refused = ""
            try:
                with_value(row, plan, wanted)
            except PlanError as error:
                refused = str(error)[:100]
            if refused:
                assert app.plan_screen.view.plan == plan
                assert refused in screen_text(app)
                continue
            assert row.value(app.plan_screen.view.plan) == wanted
            await pilot.press("u")
            assert app.plan_screen.view.plan == plan


async def test_space_steps_forward_and_left_steps_back(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("down", "down", "up", "space", "enter")
        await settle(pilot)
        assert app.plan_screen.view.plan.optimize.gradient_checkpointing == "attention"
        await pilot.press("left")
        await settle(pilot)
        assert app.plan_screen.view.plan.optimize.gradient_checkpointing == "selective"


async def test_undo_and_redo_walk_through_the_changes(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("1", "2")
        changed = app.plan_screen.view.plan
        await pilot.press("u", "u")
        assert app.plan_screen.view.plan == Plan()
        await pilot.press("u")
        assert app.plan_screen.view.plan == Plan()
        await pilot.press("y", "y")
        await settle(pilot)
        assert app.plan_screen.view.plan == changed


async def test_a_number_is_never_stale_without_a_mark(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.plan_screen._slow = True
        app.plan_screen._price_in_worker = lambda *_: None  # type: ignore[assignment, method-assign]
        await pilot.press("1")
        await pilot.pause()
        text = screen_text(app)
        assert "outdated" in text
        assert "updating" in text


async def test_an_answer_to_an_older_question_is_ignored(make_console: Make) -> None:
    from memconsole.tui.plan.priced_screen import PriceReady
    from memconsole.tui.plan.pricing import price

    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        late = price(Plan(), readings())
        await pilot.press("2")
        await settle(pilot)
        now = app.plan_screen.view.estimate
        app.plan_screen.post_message(PriceReady(0, late))
        await pilot.pause()
        assert app.plan_screen.view.estimate is now


async def test_launching_asks_for_a_name_and_says_what_will_run(make_console: Make) -> None:
    plan = plans.apply_settings(Plan(), ["device.name=cpu", "train.max_steps=120"])
    app = make_console(plan)
    launched: list[tuple[Plan, str]] = []
    app.launch = lambda plan, name, after: launched.append((plan, name))  # type: ignore[assignment, method-assign]
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("l")
        await settle(pilot)
        text = " ".join(screen_text(app).split())
        for words in ("name of the run", "stories", "from scratch", "120 steps, 246 k tokens",
                      "rows of 128 tokens per step", "a step,", "fits, "):  # fmt: skip
            assert words in text, words
        await pilot.press("escape")
        await settle(pilot)
        assert not launched
        await pilot.press("l")
        await settle(pilot)
        await pilot.press("ctrl+u", *"low rate", "enter")
        await settle(pilot)
        assert launched == [(plan, "low rate")]


async def test_a_launch_can_wait_for_a_live_run(make_console: Make) -> None:
    plan = plans.replace(Plan(), {"device.name": "cpu"})
    other = create_run(plan, "the other")
    lock = locks.take(other.supervisor_lock)  # as a supervisor does: the run is starting
    app = make_console(plan)
    launched: list[RunDirectory | None] = []
    app.launch = lambda plan, name, after: launched.append(after)  # type: ignore[assignment, method-assign]
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for presses in range(3):
            await pilot.press("l")
            await settle(pilot)
            assert "start    now" in screen_text(app)
            assert "tab start later" in screen_text(app)
            for _ in range(presses):
                await pilot.press("tab")
                await settle(pilot)
            text = screen_text(app)
            assert (f"start    after run {other.id} (the other) has ended" in text) == (
                presses == 1
            )
            await pilot.press("enter")
            await settle(pilot)
    lock.release()
    assert launched == [None, other, None]


async def test_a_plan_that_does_not_fit_says_by_how_much_and_launching_asks_again(
    make_console: Make,
) -> None:
    plan = plans.replace(BIG, {"device.name": "cpu"})
    app = make_console(plan)
    launched: list[Plan] = []
    app.launch = lambda plan, name, after: launched.append(plan)  # type: ignore[assignment, method-assign]
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        text = screen_text(app)
        assert "does not fit, " in text
        assert " over" in text
        await pilot.press("l")
        await settle(pilot)
        assert "does not fit, " in screen_text(app)
        await pilot.press("enter")
        await settle(pilot)
        assert "enter again starts it anyway" in screen_text(app)
        await pilot.press("escape")
        await settle(pilot)
        assert not launched
        await pilot.press("l")
        await settle(pilot)
        await pilot.press("enter")
        await pilot.pause(HELD_SECONDS)
        await pilot.press("enter")
        await settle(pilot)
        assert launched == [plan]


async def test_a_launch_waits_for_the_driver_of_its_device(make_console: Make) -> None:
    app = make_console(plans.apply_settings(Plan(), ["device.name=cuda:0"]))
    cpu = readings()
    note = "NVIDIA: the driver has not answered for 2 s"
    app.readings = msgspec.structs.replace(cpu, notes=(note,), unanswered=("NVIDIA",))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("l")
        await settle(pilot)
        assert "waiting for the device's driver" in screen_text(app)
        await pilot.press("down")
        app.set_devices(readings(1))
        await settle(pilot)
        assert app.screen is app.plan_screen, "another key cancels"
        app.set_devices(app.readings)
        await settle(pilot)
        await pilot.press("l")
        app.set_devices(readings(1))
        await settle(pilot)
        assert "name of the run" in screen_text(app)


async def test_a_launch_on_a_device_that_turns_out_to_be_absent_gives_the_reason(
    make_console: Make,
) -> None:
    app = make_console(plans.apply_settings(Plan(), ["device.name=cuda:0"]))
    app.readings = None
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("l")
        app.set_devices(readings())
        await settle(pilot)
        assert "cannot launch" in screen_text(app)
        assert "no such device here" in screen_text(app)


async def test_launching_what_cannot_be_trained_here_gives_the_reason(make_console: Make) -> None:
    plan = plans.apply_settings(Plan(), ["device.name=rtx-4090"])
    app = make_console(plan)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("l")
        await settle(pilot)
        assert "not launched" in screen_text(app)
        assert app.screen is app.plan_screen


async def test_the_model_picker_narrows_as_one_types(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("m")
        await settle(pilot)
        assert isinstance(app.screen, PickScreen)
        await pilot.press(*"gpt2-l")
        await settle(pilot)
        assert "gpt2-large" in screen_text(app)
        assert "llama" not in screen_text(app)
        await pilot.press("enter")
        await settle(pilot)
        assert app.plan_screen.view.plan.model.name == "gpt2-large"
        assert "gpt2-large" in screen_text(app)


async def test_a_dataset_can_be_any_path(make_console: Make, tmp_path: Path) -> None:
    (tmp_path / "my text.txt").write_text("words " * 1000)
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("d")
        await settle(pilot)
        await paste(pilot, str(tmp_path / "my text.txt"))
        await pilot.press("enter")
        await settle(pilot)
        assert app.plan_screen.view.plan.data.source == str(tmp_path / "my text.txt")


async def test_a_model_that_is_not_there_is_one_clear_line(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("m")
        await settle(pilot)
        await pilot.press(*"./nowhere", "enter")
        await settle(pilot)
        text = screen_text(app)
        assert "✗" in text
        assert "nowhere" in text
        assert "outdated" in text
        await pilot.press("l")
        await settle(pilot)
        assert "cannot launch" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_a_plan_that_cannot_be_priced_keeps_no_number_unmarked(
    make_console: Make, size: tuple[int, int]
) -> None:
    app = make_console(plans.apply_settings(Plan(), ["device.name=cpu", "train.max_steps=100"]))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        name = found.table.budget.name if (found := app.plan_screen.view.estimate) else ""
        assert f"cpu → {name}" in screen_text(app)
        app.plan_screen.change(
            lambda plan: plans.replace(plan, {"model.name": "/nope", "device.name": "h200"})
        )
        await settle(pilot)
        text = screen_text(app)
        summary = text.split("optimizations")[0]
        assert "not priced" in text
        assert "outdated" in text
        for words in ("h200 →", name, "in all", "/s ", "parameters", "expected between"):
            assert words not in summary + text.split("not priced")[1], words
        costs = [row for row in text.splitlines() if "costs " in row or "saves " in row]
        told = [row for row in costs if "→" in row]
        assert bool(told) == (size == (80, 24))
        assert all("(" in row for row in told)


async def test_a_setting_is_found_changed_and_refused_with_its_reason(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("s")
        await settle(pilot)
        await pilot.press(*"target_params", "enter")
        await settle(pilot)
        assert isinstance(app.screen, PromptScreen)
        await pilot.press("backspace", *"lots", "enter")
        await settle(pilot)
        assert "expected a whole number" in screen_text(app)
        await pilot.press(*["backspace"] * 4, *"5_000_000", "enter")
        await settle(pilot)
        assert app.plan_screen.view.plan.model.target_params == 5_000_000
        assert app.plan_screen.view.estimate is not None
        assert abs(app.plan_screen.view.estimate.parameters / 5e6 - 1) < 0.02


@pytest.mark.parametrize(
    ("key", "pressed", "value"),
    [
        ("train.objective", ["down"], "dpo"),
        ("train.objective", [*"dpo"], "dpo"),
        ("train.schedule", [], "cosine"),
        ("train.preflight", ["down"], False),
    ],
)
async def test_a_setting_with_named_values_is_picked_among_them(
    key: str, pressed: list[str], value: object, make_console: Make
) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("s", *key, "enter")
        await settle(pilot)
        assert f"● {plans.written(plans.get(app.plan_screen.view.plan, key))}" in screen_text(app)
        assert plans.SETTINGS[key].help.split()[0] in screen_text(app)
        await pilot.press(*pressed, "enter")
        await settle(pilot)
        assert plans.get(app.plan_screen.view.plan, key) == value


async def test_keys_typed_at_once_keep_their_order(make_console: Make) -> None:
    from textual import events

    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("s")
        await settle(pilot)
        await pilot.press(*"max_steps", "enter")
        await settle(pilot)
        for key in ["backspace"] * 6 + list("25"):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
        app.post_message(events.Key("enter", "\r"))
        await settle(pilot)
        assert app.plan_screen.view.plan.train.max_steps == 25


async def test_a_plan_is_saved_and_opened_again(make_console: Make, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    app = make_console(BIG)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("w")
        await settle(pilot)
        await pilot.press("backspace")
        await paste(pilot, str(path))
        await pilot.press("enter")
        await settle(pilot)
        assert "saved as" in screen_text(app)
    assert load(path) == BIG
    other = make_console()
    async with other.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("o")
        await settle(pilot)
        await pilot.press("backspace")
        await paste(pilot, str(path))
        await pilot.press("enter")
        await settle(pilot)
        assert other.plan_screen.view.plan == BIG


async def test_an_existing_file_is_overwritten_only_when_asked_twice(
    make_console: Make, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("precious")
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("w")
        await settle(pilot)
        await pilot.press("backspace")
        await paste(pilot, str(path))
        await pilot.press("enter")
        await settle(pilot)
        assert "exists" in screen_text(app)
        assert path.read_text() == "precious"
        await pilot.pause(HELD_SECONDS)
        await pilot.press("enter")
        await settle(pilot)
        assert path.read_text() != "precious"


async def test_the_command_screen_shows_the_equivalent_command(make_console: Make) -> None:
    app = make_console(BIG)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await pilot.press("c")
        await settle(pilot)
        text = screen_text(app)
        assert "memconsole train" in text
        assert "model.name=gpt2-xl" in text
        assert "[model]" in text
        await pilot.press("y")
        await settle(pilot)
        assert "also in" in screen_text(app)
    assert command_of(BIG).startswith("memconsole train --set ")


async def test_a_preset_replaces_the_plan(make_console: Make) -> None:
    from memconsole.plan import catalog

    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("n", "down", "enter")
        await settle(pilot)
        names = list(catalog.presets())
        assert app.plan_screen.view.plan == catalog.preset(names[1])


async def test_any_action_is_found_by_its_name(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("colon")
        await settle(pilot)
        await pilot.press(*"chunked", "enter")
        await settle(pilot)
        assert app.plan_screen.view.plan.optimize.fused_loss


async def test_free_memory_that_moves_moves_the_verdict(make_console: Make) -> None:
    from tests.tui.harness import GIB

    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        before = app.plan_screen.view.estimate
        app.set_devices(readings(used_bytes=15 * GIB, free_bytes=GIB))
        await settle(pilot)
        after = app.plan_screen.view.estimate
    assert before is not None
    assert after is not None
    assert after.table.free_bytes < before.table.free_bytes


def test_typing_finds_names_before_notes() -> None:
    choices = [Choice("a", "alpha", "like beta"), Choice("b", "beta"), Choice("c", "gamma")]
    assert [c.value for c in matching(choices, "BETA")] == ["b", "a"]
    assert matching(choices, "") == choices
    assert matching(choices, "nothing") == []


def test_a_change_that_changes_nothing_cannot_be_undone() -> None:
    view = PlanView(Plan())
    assert view.changed(Plan()) is view


async def test_keys_that_rest_leave_nothing_to_make_for_the_next_one(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memconsole.memory.activations import torch_step
    from memconsole.tui.plan import ahead as plan_ahead

    monkeypatch.setattr(plan_ahead, "AHEAD_SECONDS", 0.001)
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        monkeypatch.setattr(torch_step, "_moments", {})
        await pilot.press("1")
        await settle(pilot)
        deadline = time.monotonic() + 60
        while app.plan_screen._ahead.busy and time.monotonic() < deadline:
            await pilot.pause(0.02)
        assert not app.plan_screen._ahead.busy
        ready = set(torch_step._moments)
        monkeypatch.setattr(plan_ahead, "AHEAD_SECONDS", 1e6)
        await pilot.press("2")
        await settle(pilot)
        assert set(torch_step._moments) == ready


async def test_a_notice_of_the_launch_is_gone_when_one_comes_back(make_console: Make) -> None:
    run = create_run(Plan(), "mine")
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.plan_screen.notice("launching …")
        app.post_message(Launched(run.id, "launched"))
        await settle(pilot)
        assert app.run_id == run.id
        await pilot.press("p")
        await settle(pilot)
        assert app.screen is app.plan_screen
        assert "launching" not in screen_text(app)


async def test_a_dialog_stays_open_when_a_launch_is_through(make_console: Make) -> None:
    run = create_run(Plan(), "mine")
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("s", "l", "o", "r")
        await settle(pilot)
        dialog = app.screen
        app.post_message(Launched(run.id, "launched"))
        await settle(pilot)
        assert app.screen is dialog
        await pilot.press("a")
        assert "lora" in screen_text(app)
        await pilot.press("escape")
        await settle(pilot)
        assert "launched; t shows the run" in screen_text(app)
        assert app.run_id == run.id
        await pilot.press("t")
        await settle(pilot)
        assert isinstance(app.screen, RunScreen)
        assert run.name in screen_text(app)


async def test_a_key_passes_over_values_that_cannot_be_trained(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        screen = app.plan_screen
        changes = {"backend": "jax", "device.name": "h100-80gb"}
        screen.change(lambda plan: plans.replace(plan, changes))
        await settle(pilot)
        row = BY_KEY["optimize.optimizer_offload"]
        seen = []
        for _ in range(3):
            await pilot.press(KeyTable().toggle_key(row.key))
            await settle(pilot)
            seen.append(row.value(screen.view.plan))
        assert seen == ["pinned", "compressed", "none"], "JAX has no value cpu"
        await pilot.press("left")
        await settle(pilot)
        assert row.value(screen.view.plan) == "compressed"


async def test_adapters_on_random_weights_are_told_before_the_launch(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        await pilot.press(KeyTable().toggle_key("optimize.lora_rank"))
        await settle(pilot)
        assert "train refuses adapters on random weights" in " ".join(screen_text(app).split())
