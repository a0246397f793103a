"""The list of runs: filter, marks, curves side by side, deleting; and two plans side by side."""

from __future__ import annotations

import errno
import math
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

from memconsole.plan import plan as plans
from memconsole.plan.differences import differing
from memconsole.plan.plan import Plan
from memconsole.runs.act.delete import delete_run
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.labels import read_labels
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.run_store import create_run, list_runs
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.messages import FollowFailed, SnapshotArrived
from memconsole.tui.draw.comparing_plans import PricedPlan, plan_rows
from memconsole.tui.draw.comparing_runs import chart_lines, run_rows
from memconsole.tui.draw.lines import plain
from memconsole.tui.plan.dialogs.side_by_side import ComparePlansScreen
from memconsole.tui.plan.pricing import price
from memconsole.tui.runs.compare import CompareRunsScreen
from memconsole.tui.runs.screen import RunsScreen
from memconsole.tui.screens.base import HELD_SECONDS
from memconsole.tui.screens.prompt import PromptScreen
from memconsole.tui.widgets.entry import Entry
from tests.tui.harness import Console, finished, screen_text, settle, snapshot

Make = Callable[..., Console]


def run_on_disk(name: str, height: float = 3.0, **settings: Any) -> RunDirectory:
    """A run that logged 40 losses falling to `height` and then vanished."""
    run = create_run(plans.replace(Plan(), {"device.name": "cpu", **settings}), name)
    log = EventWriter(run.attempt_path(run.new_attempt()))
    for step in range(1, 41):
        log.write(
            events.Step(
                step=step, epoch=1, loss=height + 4 * math.exp(-step / 9), learning_rate=1e-3,
                gradient_norm=1.0, tokens=step * 64, tokens_per_second=640.0, step_seconds=0.1,
            )
        )  # fmt: skip
    log.close()
    return run


async def listed(app: Console, pilot: Any) -> RunsScreen:
    await settle(pilot)
    await pilot.press("a")
    await settle(pilot)
    screen = app.screen
    assert isinstance(screen, RunsScreen)
    return screen


async def test_typing_narrows_the_list_and_escape_shows_all(make_console: Make) -> None:
    for name in ("alpha quick", "beta", "gamma quick"):
        run_on_disk(name)
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(app, pilot)
        await pilot.press("slash", *"quick")
        await settle(pilot)
        text = screen_text(app)
        assert "alpha quick" in text
        assert "gamma quick" in text
        assert "beta" not in text
        assert app.is_running, "q was typed, not pressed"
        await pilot.press("space", *"lost")
        await settle(pilot)
        assert "alpha quick" in screen_text(app)
        await pilot.press("space", *"nowhere", "enter")
        await settle(pilot)
        assert "no run holds" in screen_text(app)
        await pilot.press("escape")
        await settle(pilot)
        assert "beta" in screen_text(app)
        assert isinstance(app.screen, RunsScreen)
        await pilot.press("escape")
        await settle(pilot)
        assert app.screen is app.plan_screen


async def test_marked_runs_are_compared_by_curve_figure_and_setting(make_console: Make) -> None:
    run_on_disk("slow", 5.0, **{"train.learning_rate": 1e-5})
    run_on_disk("fast", 2.0)
    app = make_console()
    async with app.run_test(size=(100, 40)) as pilot:
        await listed(app, pilot)
        assert "c compare" not in screen_text(app)
        await pilot.press("space")
        await settle(pilot)
        assert "1 marked" in screen_text(app)
        await pilot.press("space", "c")
        await settle(pilot)
        assert isinstance(app.screen, CompareRunsScreen)
        text = screen_text(app)
        for words in (" fast ", " slow ", "2.04", "5.04", "640", "learning_rate", "1e-05"):
            assert words in text, words
        assert "batch_size" not in text, "only what differs"
        await pilot.press("o")
        await settle(pilot)
        assert "no validation loss" in screen_text(app)
        await pilot.press("o", "y")
        await settle(pilot)
        assert "log" in screen_text(app)
        await pilot.press("question_mark")
        await settle(pilot)
        assert "Logarithmic or linear loss axis." in screen_text(app)
        await pilot.press("escape", "escape")
        await settle(pilot)
        assert isinstance(app.screen, RunsScreen)


async def test_names_that_mean_another_run_are_refused(make_console: Make) -> None:
    for name in ("alpha", "beta"):
        run_on_disk(name)
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(app, pilot)
        await pilot.press("n")
        await settle(pilot)
        assert isinstance(app.screen, PromptScreen)
        (other,) = {"alpha", "beta"} - {app.screen.part(Entry).value}
        app.screen.part(Entry).value = other
        await pilot.press("enter")
        await settle(pilot)
        assert f'has the name "{other}"; expected a name that no run has' in screen_text(app)
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("l")
        await settle(pilot)
        assert isinstance(app.screen, PromptScreen)
        app.screen.part(Entry).value = "latest"
        await pilot.press("enter")
        await settle(pilot)
        assert 'the name "latest" stands for the newest run' in screen_text(app)
    assert {run.name for run in list_runs()} == {"alpha", "beta"}


def test_curves_are_told_apart_without_colour() -> None:
    drawn, _ = chart_lines([finished(), snapshot(600)], 80, 16)
    text = "\n".join(plain(line) for line in drawn)
    assert "1" in text[text.index("\n") :]
    numbers = {span.text.strip() for line in drawn for span in line if span.role == "validation"}
    assert any("2" in text for text in numbers)


def test_five_runs_are_too_many_for_one_chart() -> None:
    rows = [plain(line) for line in run_rows([snapshot(name=f"r{n}") for n in range(5)], 120)]
    assert "4 r3" in rows[0]
    assert "r4" not in rows[0]


def test_losses_of_runs_side_by_side_have_units_if_their_tasks_differ() -> None:
    windows = snapshot(plan=plans.replace(Plan(), {"model.name": "lqr"}))
    for runs, unit in (([snapshot(), windows], " nats per token "), ([snapshot()] * 2, "")):
        rows = [plain(line) for line in run_rows(runs, 100)]
        for name in ("train loss", "best validation"):
            (row,) = (row for row in rows if row.strip().startswith(name))
            assert unit in row
            assert ("masked MSE" in row, "nats" in row) == (bool(unit), bool(unit))


async def test_a_run_is_deleted_only_after_a_yes(make_console: Make) -> None:
    kept, gone = run_on_disk("kept"), run_on_disk("gone")
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(app, pilot)
        await pilot.press("slash", *"gone", "enter", "D")
        await settle(pilot)
        assert "Delete run gone" in screen_text(app)
        await pilot.press("escape")
        await settle(pilot)
        assert gone.path.exists()
        await pilot.press("D")
        await pilot.pause(HELD_SECONDS)
        await pilot.press("d")
        await settle(pilot)
        await settle(pilot)
        assert list_runs() == [kept]
        assert "deleted gone" in screen_text(app)
        assert "no run holds" in screen_text(app)


async def test_a_watched_run_that_another_process_deletes_keeps_its_figures(
    make_console: Make,
) -> None:
    run = run_on_disk("gone")
    app = make_console()
    app.interval_seconds = 0.05
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await app.watch_run(run.id)
        await shown(app, pilot, "train 3.047")
        delete_run(run)
        await shown(app, pilot, "run gone has been deleted")
        view = app.run_view
        assert view.snapshot is not None
        assert view.snapshot.facts.step == 40
        await settle(pilot)
        assert all(worker.is_finished for worker in app.workers if worker.group == "follow")


async def test_a_run_that_cannot_be_read_for_a_while_is_said_and_then_followed_again(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_on_disk("shared")
    app = make_console()
    app.interval_seconds = 0.05
    poll = Follower.poll

    def stale(follower: Follower) -> RunSnapshot:
        raise OSError(errno.ESTALE, "Stale file handle")

    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await app.watch_run(run.id)
        await shown(app, pilot, "train 3.047")
        with monkeypatch.context() as patch:
            patch.setattr(Follower, "poll", stale)
            await shown(app, pilot, "run shared cannot be read: Stale file handle")
        assert Follower.poll is poll
        await pilot.pause(0.5)
        await settle(pilot)
        assert "cannot be read" not in screen_text(app)


async def test_what_the_follower_of_another_run_says_late_is_dropped(make_console: Make) -> None:
    one, other = run_on_disk("one"), run_on_disk("other")
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await app.watch_run(one.id)
        await shown(app, pilot, "train 3.047")
        before, stopped = app.run_view.snapshot, app._stop_following
        assert before is not None
        await app.watch_run(other.id)
        app.post_message(SnapshotArrived(before, stopped=stopped))
        app.post_message(FollowFailed("run one has been deleted", stopped=stopped))
        await settle(pilot)
        await settle(pilot)
        assert app.run_id == other.id
        assert app.run_view.snapshot is None or app.run_view.snapshot.id == other.id
        assert app.run_view.problem == ""


async def shown(app: Console, pilot: Any, words: str) -> None:
    """Wait until the screen shows `words`."""
    deadline = time.monotonic() + 10
    while words not in screen_text(app) and time.monotonic() < deadline:
        await pilot.pause(0.02)
    assert words in screen_text(app)


async def test_name_tags_and_note_are_typed_in_the_list_and_told_there(make_console: Make) -> None:
    run = run_on_disk("alpha")
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(app, pilot)
        await pilot.press("n", "ctrl+u", *"omega", "enter")
        await settle(pilot)
        await pilot.press("number_sign", *"paper sweep", "enter")
        await settle(pilot)
        await pilot.press("number_sign", "ctrl+u", *"bad,tag", "enter")
        await settle(pilot)
        assert "without a comma" in screen_text(app)
        await pilot.press("ctrl+u", *"sweep", "enter")
        await settle(pilot)
        await pilot.press("N", *"too slow", "enter")
        await settle(pilot)
        await settle(pilot)
        text = screen_text(app)
        assert "omega" in text
        assert "alpha" not in text
        assert "#sweep too slow" in text
        assert (run.name, read_labels(run.path).tags) == ("omega", ("sweep",))


@pytest.mark.parametrize(
    ("reason", "offered"), [("stopped", True), ("killed", True), ("bad_plan", False)]
)
async def test_the_list_offers_to_resume_what_the_command_takes_up_again(
    make_console: Make, reason: str, offered: bool
) -> None:
    run = run_on_disk("ended")
    why = Verdict(reason=reason, evidence="it ended, and saved nothing")
    files.write_struct(run.attempt_path(1) / "exit.json", ExitRecord(verdict=why, time_wall=1.0))
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(app, pilot)
        assert ("r resume" in screen_text(app)) == offered


async def test_a_run_with_a_living_process_is_not_deleted(make_console: Make) -> None:
    run = run_on_disk("alive")
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(app, pilot)
        await pilot.press("D")
        await settle(pilot)
        lock = locks.take(run.supervisor_lock)  # someone resumes it while we think
        try:
            await pilot.press("s")
            await settle(pilot)
        finally:
            lock.release()
        assert run.path.exists()


async def test_a_run_that_another_person_deleted_meanwhile_is_said_to_be_gone(
    make_console: Make,
) -> None:
    run = run_on_disk("gone")
    app = make_console()
    async with app.run_test(size=(120, 30)) as pilot:
        await listed(app, pilot)
        await pilot.press("D")
        await pilot.pause(HELD_SECONDS)
        shutil.rmtree(run.path)
        await pilot.press("d")
        await settle(pilot)
        await settle(pilot)
        assert "has been deleted already" in screen_text(app)


async def test_a_read_only_console_deletes_nothing(make_console: Make) -> None:
    run_on_disk("kept")
    app = make_console(readonly=True)
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(app, pilot)
        await pilot.press("D")
        await settle(pilot)
        assert isinstance(app.screen, RunsScreen)
        assert "delete" not in screen_text(app)


def priced(name: str, **settings: Any) -> PricedPlan:
    plan = plans.replace(Plan(), {"device.name": "rtx-3060-12gb", **settings})
    found = price(plan, None)
    return PricedPlan(name, plan, found.estimate, found.problem)


def test_two_plans_differ_by_setting_component_and_verdict() -> None:
    this = priced("this")
    other = priced("other", **{"optimize.precision": "bf16", "train.batch_size": 32})
    assert differing([this.plan, other.plan]) == {
        "train.batch_size": (16, 32),
        "optimize.precision": ("fp32", "bf16"),
    }
    text = "\n".join(plain(line) for line in plan_rows(this, other, 100))
    for words in ("precision", "batch_size", "activations", "allocated", "✓ ", "tokens/s", "x"):
        assert words in text, words
    same = "\n".join(plain(line) for line in plan_rows(this, this, 100))
    assert "none" in same
    assert "+" not in same


def test_a_plan_that_cannot_be_priced_says_why() -> None:
    bad = PricedPlan("bad", Plan(), None, "no such device")
    text = "\n".join(plain(line) for line in plan_rows(priced("this"), bad, 100))
    assert "bad: not priced — no such device" in text


async def test_a_plan_is_put_beside_its_earlier_state_and_taken_back(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        before = app.plan_screen.view.plan
        await pilot.press("b", "C")
        await settle(pilot)
        assert "before the last change" in screen_text(app)
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, ComparePlansScreen)
        text = screen_text(app)
        assert "batch_size" in text
        assert "saved by" in text
        await pilot.press("enter")
        await settle(pilot)
        assert app.screen is app.plan_screen
        assert app.plan_screen.view.plan == before
