"""The run screen, the list of runs, and what is said on leaving."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len

from memconsole.memory.table import Estimate
from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.curves.curve import Curve
from memconsole.runs.read.shown.snapshot import Help, RunSnapshot, Symptom
from memconsole.runs.read.state.stages import Stage
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.closing import closing_words
from memconsole.tui.app.following import _same_sample
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.draw.lines import plain
from memconsole.tui.plan.pricing import price
from memconsole.tui.plan.screen import PlanScreen
from memconsole.tui.run.header import header_lines, progress_line, steps_word, time_line
from memconsole.tui.run.output_pane import OutputPane, _broken, sample_lines
from memconsole.tui.run.predictions import predicted
from memconsole.tui.run.screen import RunScreen
from memconsole.tui.screens.base import HELD_SECONDS
from memconsole.tui.screens.confirm import ConfirmScreen
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import (
    Console,
    finished,
    readings,
    screen_lines,
    screen_text,
    settle,
    show_run,
    snapshot,
)

Make = Callable[..., Console]


async def test_a_live_run_shows_everything_one_watches(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(120, 40)) as pilot:
        await show_run(app, pilot, snapshot(step=820))
        text = screen_text(app)
    for words in ("running", "my stories", "train", "step 820/1,200", "68 %", "5 min 25 s left",
                  "validation 3.2", "unigram 5.712", "◆", "epochs", "1.25", "host RAM", "┃",
                  "predicted 152 MiB", "151 MiB", "590 MiB", "5,230", "step 820 loss",
                  "s stop"):  # fmt: skip
        assert words in text, words
    assert any(0x2800 < ord(c) < 0x2900 for c in text), "the curve is drawn in braille"


async def test_the_predicted_peak_is_priced_from_the_runs_own_plan(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        expected = price(Plan(), app.devices).estimate
        found = app.run_view.prediction
    assert expected is not None
    assert found is not None
    assert found.table.phases == expected.table.phases


def test_the_estimate_kept_at_launch_is_the_prediction() -> None:
    run = create_run(Plan(), None)
    found = price(Plan(), None)
    assert found.estimate is not None
    kept = msgspec.structs.replace(found.estimate, step_seconds=123.0)
    (run.path / "estimate.json").write_bytes(msgspec.json.encode(kept))
    assert predicted(run.id, Plan(), None) == (kept, "")
    (run.path / "estimate.json").write_bytes(b"{")
    again, _ = predicted(run.id, Plan(), readings())
    assert isinstance(again, Estimate)
    assert again.step_seconds != 123.0
    assert again.table.budget.usable_bytes > kept.table.budget.total_bytes // 2, (
        "the run holds some"
    )
    assert predicted(run.id, Plan(), None) == (
        None,
        "the devices of this machine are not known yet",
    )
    planned = replace(Plan(), {"device.name": "h100-80gb"})
    assert isinstance(predicted(run.id, planned, None)[0], Estimate)


async def test_a_finished_run_shows_its_summary(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, finished())
        text = screen_text(app)
    for words in ("finished", "best 3.202", "final 3.202", "unigram 5.712", "3.214",
                  "1.25 min/epoch", "4.10 minutes trained", "Test CPU",
                  "measured 171 MiB", "predicted ~"):  # fmt: skip
        assert words in text, words
    assert "s stop" not in text


@pytest.mark.parametrize("slow_link", [False, True])
async def test_a_run_that_ends_turns_to_its_summary_and_back_when_resumed(
    make_console: Make, slow_link: bool
) -> None:
    first = "closed" if slow_link else "output"
    app = make_console(slow_link=slow_link)
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        assert app.run_view.pane == first
        app.post_message(SnapshotArrived(finished()))
        await settle(pilot)
        assert app.run_view.pane == "summary"
        assert "best 3.202" in screen_text(app)
        app.post_message(SnapshotArrived(snapshot(attempt=2)))
        await settle(pilot)
        assert app.run_view.pane == first
        assert ("step 340 loss" in screen_text(app)) is not slow_link


async def test_the_bell_rings_once_when_a_watched_run_ends(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_console()
    rings: list[bool] = []
    monkeypatch.setattr(app, "bell", lambda: rings.append(True))
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, finished())
        app.post_message(SnapshotArrived(snapshot(attempt=2)))
        await settle(pilot)
        assert rings == []
        for _ in range(2):
            app.post_message(SnapshotArrived(finished()))
            await settle(pilot)
        assert rings == [True]


async def test_a_resumed_run_says_that_it_repeats_steps(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot(step=340, attempt=2, repeats_to=400))
        assert "step 340/1,200 (repeats to 400)" in screen_text(app)
        app.post_message(SnapshotArrived(snapshot(step=400, attempt=2, repeats_to=400)))
        await settle(pilot)
        assert "repeats" not in screen_text(app)


async def test_a_failed_run_says_why_and_can_be_resumed(make_console: Make) -> None:
    run = snapshot(
        state="failed",
        verdict=Verdict(reason="crashed", evidence="the log says so", resumable=True),
        error=events.Error(cause="crashed", message="no such layer\nat line 3"),
    )
    app = make_console()
    resumed: list[str] = []
    app.resume = resumed.append  # type: ignore[assignment, method-assign]
    async with app.run_test(size=(120, 30)) as pilot:
        await show_run(app, pilot, run)
        text = screen_text(app)
        assert "crashed: the log says so · no such layer — r resumes it" in text
        assert "r resume" in text
        await pilot.press("r")
        await settle(pilot)
    assert resumed == [run.id]


async def test_stopping_asks_first(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        await pilot.press("s")
        await settle(pilot)
        assert isinstance(app.screen, ConfirmScreen)
        text = screen_text(app)
        assert "stop" in text
        assert "kill" in text
        assert "cancel" in text
        await pilot.press("escape")
        await settle(pilot)
        assert app.asked == []
        for answer in ("s", "k"):
            await pilot.press("s")
            await pilot.pause(HELD_SECONDS)
            await pilot.press(answer)
            await settle(pilot)
        run_id = app.run_id
    assert app.asked == [(run_id, "stop"), (run_id, "kill")]


async def test_read_only_offers_nothing_that_changes_a_run(make_console: Make) -> None:
    app = make_console(readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await show_run(app, pilot, snapshot())
        await pilot.press("s")
        await settle(pilot)
        assert isinstance(app.screen, RunScreen)
        text = screen_text(app)
        assert "read only" in text
        assert "s stop" not in text
        await pilot.press("p", "l")
        await settle(pilot)
        assert isinstance(app.screen, PlanScreen)
        assert not list_runs_made()


def list_runs_made() -> list[object]:
    from memconsole.runs.record.run_store import list_runs

    return list(list_runs())


async def test_the_lower_pane_switches_between_output_sample_and_summary(
    make_console: Make,
) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        assert "step 340 loss" in screen_text(app)
        await pilot.press("o")
        await settle(pilot)
        assert "return 1" in screen_text(app)
        await pilot.press("o")
        await settle(pilot)
        assert "validation loss" in screen_text(app)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("stories", "a text is sampled at each evaluation"),
        ("lqr", "no text is sampled: the data are windows of numbers, not text"),
        ("efficientids", "no text is sampled: the data are histories of items, not text"),
    ],
)
def test_the_sample_pane_of_a_task_without_text_says_that_none_is_sampled(
    model: str, words: str
) -> None:
    run = snapshot(sample=None, plan=replace(Plan(), {"model.name": model}))
    (line,) = sample_lines(RunView(run), 80)
    assert plain(line).strip() == words


def test_the_sample_pane_of_a_run_that_samples_none_names_the_setting() -> None:
    run = snapshot(sample=None, plan=replace(Plan(), {"train.sample_tokens": 0}))
    (line,) = sample_lines(RunView(run), 80)
    assert plain(line).strip() == "no text is sampled: train.sample_tokens = 0"


async def test_a_slow_link_begins_with_the_log_closed_and_sends_none_of_it(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_console(slow_link=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot(warnings=("the disk is slow",)))
        text = screen_text(app)
        assert "closed: o shows the output" in text
        assert "1 warning" in text
        assert "step 340 loss" not in text
        drawn: list[OutputPane] = []
        monkeypatch.setattr(OutputPane, "refresh", lambda self, *_, **__: drawn.append(self))
        app.post_message(SnapshotArrived(snapshot(360, warnings=("the disk is slow",))))
        await settle(pilot)
        assert app.run_view.snapshot is not None
        assert app.run_view.snapshot.facts.step == 360
        assert not drawn
        monkeypatch.undo()
        await pilot.press("o")
        await settle(pilot)
        assert "step 360 loss" in screen_text(app)
        await pilot.press("o", "o", "o")
        await settle(pilot)
        assert app.run_view.pane == "closed"


async def test_the_log_scrolls_back_and_says_how_much_is_below(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        await pilot.press("pageup")
        await settle(pilot)
        text = screen_text(app)
        assert "10 more lines below" in text
        assert "step 340 loss" not in text


async def test_scales_glyphs_and_zoom_switch(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        plain = screen_text(app)
        await pilot.press("z")
        await settle(pilot)
        zoomed = screen_text(app)
        assert zoomed != plain
        assert "250" in zoomed
        await pilot.press("z", "k", "k")
        await settle(pilot)
        assert not any(0x2800 < ord(c) < 0x2900 for c in screen_text(app))
        await pilot.press("y")
        await settle(pilot)
        assert app.run_view.logarithmic


def painted(app: Console) -> bool:
    """Whether every widget that is seen was drawn at its present size."""
    from memconsole.tui.widgets.painted import Painted

    seen = [w for w in app.screen.query(Painted) if w.display and w.content_size.area]
    return all(w._painted == tuple(w.content_size) for w in seen)


async def test_a_further_step_repaints_only_changed_rows(make_console: Make) -> None:
    from memconsole.tui.widgets.painted import Painted

    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot(step=600))
        sent: list[tuple[Painted, Any]] = []
        original = Painted.refresh

        def recording(self: Painted, *given: Any, **options: Any) -> Any:
            sent.extend((self, region) for region in given or [None])
            return original(self, *given, **options)

        async def shown(run: RunSnapshot) -> list[Any]:
            sent.clear()
            app.post_message(SnapshotArrived(run))
            while app.run_view.snapshot is not run:
                await pilot.pause(0.02)
            await settle(pilot)
            return list(sent)

        Painted.refresh = recording  # type: ignore[method-assign]
        try:
            deadline = time.monotonic() + 30
            while (app.run_view.prediction is None or not painted(app)) and (
                time.monotonic() < deadline
            ):
                await pilot.pause(0.05)
            while await shown(snapshot(step=600)) and time.monotonic() < deadline:
                await pilot.pause(0.05)
            tail = snapshot(600).log_tail
            # Something else may be drawn at the same moment, as a gauge; it is not at each of four steps.
            steps = [await shown(snapshot(step=n, log_tail=tail)) for n in (610, 620, 630, 640)]
        finally:
            Painted.refresh = original  # type: ignore[method-assign]
    assert any(
        all(region is not None for _, region in changed)
        and 1 <= len(changed) <= 12
        and sum(region.width for _, region in changed) < 250
        for changed in steps
    ), steps


async def test_the_plan_of_a_run_can_be_taken_up_and_changed(make_console: Make) -> None:
    from memconsole.plan import plan as plans

    other = plans.apply_settings(Plan(), ["train.batch_size=4"])
    whole = plans.replace(other, {"train.learning_rate": 2e-3})
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        shown = snapshot(plan=whole, by_recipe=frozenset({"train.learning_rate"}))
        await show_run(app, pilot, shown)
        await pilot.press("e")
        await settle(pilot)
        assert isinstance(app.screen, PlanScreen)
        assert app.plan_screen.view.plan == other
        assert app.plan_screen.view.estimate is not None
        assert not app.plan_screen.view.stale


async def test_attaching_to_a_run_that_is_not_there_says_so(make_console: Make) -> None:
    app = make_console(attach="nosuchrun")
    async with app.run_test(size=(80, 24)) as pilot:
        deadline = time.monotonic() + 30
        while "no runs yet" not in screen_text(app) and time.monotonic() < deadline:
            await pilot.pause(0.02)
        assert isinstance(app.screen, RunScreen)
        assert "no runs yet" in screen_text(app)


async def test_a_run_directory_is_followed_and_listed(make_console: Make) -> None:
    run = create_run(Plan(), "alpha")
    app = make_console(attach=run.id)
    async with app.run_test(size=(100, 30)) as pilot:
        deadline = time.monotonic() + 30
        while app.run_view.snapshot is None and time.monotonic() < deadline:
            await pilot.pause(0.02)
        await settle(pilot)
        assert app.run_view.snapshot is not None
        assert "alpha" in screen_text(app)
        await pilot.press("a")
        await settle(pilot)
        lines = [line for line in screen_lines(app) if "alpha" in line]
        assert lines
        assert "stories" in lines[0]
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, RunScreen)


async def test_the_list_says_when_there_are_no_runs(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)
        assert "no runs yet" in screen_text(app)
        await pilot.press("escape")
        await settle(pilot)
        assert isinstance(app.screen, PlanScreen)


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_leaving_is_one_key_from_the_run(make_console: Make, key: str) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        await pilot.press(key)
        await pilot.pause()
    assert app.return_code == 0
    assert app.asked == []


def test_leaving_a_live_run_tells_the_way_back() -> None:
    words = "\n".join(closing_words(RunView(snapshot())))
    assert "goes on" in words
    assert "memconsole attach 20251121-014233-k3x2ab" in words


def test_leaving_an_ended_run_tells_where_its_figures_are() -> None:
    assert "memconsole report" in "\n".join(closing_words(RunView(finished())))
    stopped = snapshot(
        state="stopped", verdict=Verdict(reason="stopped", evidence="asked", resumable=True)
    )
    assert "memconsole resume" in "\n".join(closing_words(RunView(stopped)))
    assert closing_words(RunView()) == []
    not_finite = Verdict(reason="nan", evidence="the loss was not finite", resumable=True)
    view = RunView(snapshot(state="failed", verdict=not_finite))
    assert "--set train.learning_rate=…   goes on" in "\n".join(closing_words(view))
    header = "".join(span.text for line in header_lines(view, 120, 2) for span in line)
    assert "memconsole resume k3x2ab --set train.learning_rate=… goes on" in header


def test_a_loss_that_is_not_finite_is_named() -> None:
    run = snapshot(
        evaluations=(
            events.Evaluation(step=1, loss=None, bits_per_byte=None, tokens=1, seconds=1.0),
        ),
        epochs=(events.Epoch(epoch=1, train_loss=None, validation_loss=None, minutes=1.0),),
    )
    from memconsole.tui.draw.lines import plain
    from memconsole.tui.run.epoch_table import epoch_lines

    text = "\n".join(plain(line) for line in epoch_lines(RunView(run), 60, 10))
    assert "n/a" in text


async def test_space_pauses_a_live_run_and_lets_a_paused_one_go_on(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(120, 40)) as pilot:
        await show_run(app, pilot, snapshot())
        assert "space pause" in screen_text(app)
        await pilot.press("space")
        app.post_message(SnapshotArrived(snapshot(pause_requested=True)))
        await settle(pilot)
        assert "pauses after this step" in screen_text(app)
        app.post_message(SnapshotArrived(snapshot(pause_requested=True, phase="paused")))
        await settle(pilot)
        assert "‖ paused" in screen_text(app)
        assert "space go on" in screen_text(app)
        await pilot.press("space")
        await settle(pilot)
    assert [what for _, what in app.asked] == ["pause", "continue"]


async def test_a_read_only_console_pauses_nothing(make_console: Make) -> None:
    app = make_console(readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await show_run(app, pilot, snapshot())
        await pilot.press("space")
        await settle(pilot)
        assert "space pause" not in screen_text(app)
    assert app.asked == []


async def test_what_goes_wrong_is_shown_with_the_key_that_lists_what_helps(
    make_console: Make,
) -> None:
    helps = (Help({"data.streaming": False}, "tokens stay in memory"),)
    symptom = Symptom("waits_for_data", "34 % of a step is spent waiting for data", helps)
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, snapshot())
        assert "waiting for data" not in screen_text(app)
        await show_run(app, pilot, snapshot(symptoms=(symptom,)))
        assert "34 % of a step is spent waiting for data — f: what helps" in screen_text(app)
        await pilot.press("f")
        await settle(pilot)
        assert "data.streaming = false" in screen_text(app)
        await pilot.press("enter")
        await settle(pilot)
        assert app.plan_screen.view.plan.data.streaming is False


def test_the_time_left_says_what_it_counts() -> None:
    run = snapshot(820)
    words = plain(time_line(RunView(run), 120))
    assert words == (
        " elapsed 3 min 00 s · left 5 min 25 s = 380 steps × 390 ms + 2 min 57 s of evaluating and saving"
    )
    unknown = plain(progress_line(RunView(run), msgspec.structs.replace(run, eta_seconds=None), 80))
    assert unknown.rstrip().endswith(" 68 %"), "no dash in place of a time"
    slow = msgspec.structs.replace(run, pace_seconds=8.0, steps_done=820.37, eta_seconds=3040.0)
    assert steps_word(slow) == "820.3"
    assert steps_word(run) == "820"
    assert "left 50 min 40 s = 380 steps × 8.0 s" in plain(time_line(RunView(slow), 120))


async def test_before_the_first_step_the_screen_tells_stages_instead_of_an_empty_axis(
    make_console: Make,
) -> None:
    stages = (Stage("import", "", 2.25), Stage("build", "from scratch", 12.5, running=True))
    run = snapshot(
        0, phase="build", phase_detail="from scratch", stages=stages, phase_seconds=12.5,
        elapsed_seconds=15.0, epochs=(),
    )  # fmt: skip
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, run)
        text = screen_text(app)
        assert re.search(r"✓ importing PyTorch +2\.2 s", text)
        assert "● building the model, from scratch  12 s" in text
        assert "building the model, from scratch  12 s  15 s since the start · 1,200 steps" in text
        assert "┤" not in text


def test_sampled_text_of_wide_characters_is_shown_whole() -> None:
    text = "汉字" * 60
    rows = _broken(text, 79)
    assert "".join(rows) == text
    assert all(cell_len(row) <= 79 for row in rows)
    assert _broken("", 10) == [""]


def test_an_older_sample_that_is_read_stays_while_another_arrives() -> None:
    def sampled(count: int) -> RunSnapshot:
        texts = tuple(
            events.Sample(step=10 * n, prompt="a", text=str(n)) for n in range(1, count + 1)
        )
        return snapshot(samples=texts)

    view = RunView(snapshot=sampled(4), sample=2)
    assert _same_sample(view, sampled(5)) == 3
    assert _same_sample(view, sampled(4)) == 2
    assert _same_sample(dataclasses.replace(view, sample=0), sampled(5)) == 0


async def test_values_that_have_no_logarithm_keep_their_axis(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        points = Curve((1, 2, 3), (0.5, -0.1, 0.2))
        await show_run(app, pilot, snapshot(train=points, recent_train=points))
        await pilot.press("y")
        await settle(pilot)
        assert "values of 0 or less have no logarithm" in screen_text(app)
        assert not app.run_view.logarithmic
