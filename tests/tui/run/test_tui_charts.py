"""The charts of a run and its samples: every logged series, several side by side, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.curves.curve import Curve, SeriesCurves
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.state.reduce import MAX_SAMPLES, SAMPLE_CHARACTERS, RunState, reduce
from memconsole.runs.record.log import events
from memconsole.tui.run.charts import charts_of, is_logarithmic, large_chart
from memconsole.tui.run.line_chart import legend, small_charts
from memconsole.tui.run.summary import summary_rows
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import Console, screen_text, settle, show_run, snapshot

Make = Callable[..., Console]
STEPS = tuple(range(10, 821, 10))


def lqr(**changes: Any) -> RunSnapshot:
    """A run whose loss falls by two orders of magnitude, with measures and samples."""
    series = SeriesCurves(
        Curve(STEPS, tuple(0.3 + 20 * math.exp(-s / 50) for s in STEPS)),
        Curve(STEPS, tuple(1e-3 * (1 - s / 1300) for s in STEPS)),
        Curve(STEPS, tuple(5000.0 + s % 30 for s in STEPS)),
    )
    evaluations = tuple(
        events.Evaluation(
            step=s, loss=0.03, bits_per_byte=None, tokens=100, seconds=1.0,
            metrics={"mean_absolute_error": 0.12 + 1 / s, "cost_ratio": 1 + 90 / s, "linear_loss": 0.04},
        )
        for s in range(100, 801, 100)
    )  # fmt: skip
    samples = tuple(
        events.Sample(step=s, prompt="def f(", text=f"n={s}):\n") for s in (300, 600, 800)
    )
    values: dict[str, Any] = {
        "plan": replace(Plan(), {"model.name": "lqr", "data.source": "x.h5"}),
        "train": Curve(STEPS, tuple(0.02 + 2 * math.exp(-s / 60) for s in STEPS)),
        "series": series, "recent_series": series, "evaluations": evaluations, "samples": samples,
        "sample": samples[-1],
    }  # fmt: skip
    return snapshot(820, **(values | changes))


def test_every_logged_series_has_a_chart() -> None:
    run = lqr()
    names = [chart.name for chart in charts_of(RunView(run))]
    assert names == [
        "loss", "MAE", "x optimal cost", "gradient norm", "windows/s", "learning rate",
        "host RAM tensors, MiB", "host RAM process, MiB",
    ]  # fmt: skip
    on_device = msgspec.structs.replace(run.gauges, device=run.gauges.host)
    names = [chart.name for chart in charts_of(RunView(lqr(gauges=on_device)))]
    assert len(set(names)) == len(names)
    assert names[-3:] == ["host RAM tensors, MiB", "on device, MiB", "host RAM process, MiB"]
    assert [chart.name for chart in charts_of(RunView(snapshot(0)))] == ["loss"]


def test_the_axis_of_a_series_that_spans_orders_is_logarithmic() -> None:
    found = {chart.name: chart for chart in charts_of(RunView(lqr()))}
    assert {name for name, chart in found.items() if chart.logarithmic} == {"loss", "gradient norm"}
    text = next(iter(charts_of(RunView(snapshot(820)))))
    assert not text.logarithmic
    view = RunView(lqr())
    assert is_logarithmic(found["loss"], view)
    assert not is_logarithmic(found["loss"], RunView(lqr(), logarithmic=False))


@pytest.mark.parametrize(
    ("size", "count"), [((42, 12), 0), ((54, 15), 0), ((72, 21), 2), ((102, 25), 4), ((200, 40), 7)]
)
def test_as_many_charts_stand_side_by_side_as_fit(size: tuple[int, int], count: int) -> None:
    found, rows = small_charts(*size, 7)
    assert found == count
    assert size[1] - rows >= 11


async def test_a_key_brings_each_series_and_the_axis_can_be_changed(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(160, 48)) as pilot:
        await show_run(app, pilot, lqr())
        text = screen_text(app)
        for words in ("MAE 0.121", "x optimal cost 1.113", "gradient norm 0.8", "windows/s 5,230"):
            assert words in text, words
        assert "log" in text.splitlines()[6]
        await pilot.press("y")
        await settle(pilot)
        assert "  log" not in screen_text(app).splitlines()[6]
        await pilot.press("N")
        await settle(pilot)
        assert "host RAM process, MiB 589 MiB" in screen_text(app)
        assert "8 of 8" in screen_text(app)
        await pilot.press("n", "n", "n", "n")
        await settle(pilot)
        large = large_chart(app.run_view)
        assert large is not None
        assert large.name == "gradient norm"
        assert app.run_view.logarithmic is None


async def test_samples_of_earlier_evaluations_can_be_stepped_through(make_console: Make) -> None:
    app = make_console()
    async with app.run_test(size=(80, 24)) as pilot:
        await show_run(app, pilot, lqr())
        assert "← older" not in screen_text(app)
        await pilot.press("o")
        await settle(pilot)
        text = screen_text(app)
        assert "step 800" in text
        assert "3 of 3" in text
        assert "← older" in text
        await pilot.press("left")
        await settle(pilot)
        text = screen_text(app)
        assert "step 600" in text
        assert "def f(n=600):" in text
        assert "2 of 3" in text
        await pilot.press("left", "left", "left")
        await settle(pilot)
        assert "def f(n=300):" in screen_text(app)
        await pilot.press("right", "right", "right")
        await settle(pilot)
        assert "def f(n=800):" in screen_text(app)


def test_kept_samples_are_few_and_short_and_a_resumed_run_drops_those_it_repeats() -> None:
    state = RunState(step=MAX_SAMPLES + 10)
    for step in range(1, MAX_SAMPLES + 11):
        reduce(state, events.Sample(step=step, prompt="p", text="x" * 10_000))
    assert [s.step for s in state.samples] == list(range(11, MAX_SAMPLES + 11))
    assert {len(s.text) for s in state.samples} == {SAMPLE_CHARACTERS}
    assert state.sample is not None
    assert len(state.sample.text) == 10_000
    started = events.Started(
        attempt=2, backend="torch", versions={}, device_id="cpu", device_name="", device_kind="cpu",
        memory_label="", platform_lines=(), resumed_step=20,
    )  # fmt: skip
    reduce(state, started)
    assert [s.step for s in state.samples] == list(range(11, 21))


def test_norm_rate_and_speed_are_kept_by_step_and_repeated_steps_replace_them() -> None:
    state = RunState()

    def step(number: int, norm: float | None) -> events.Step:
        return events.Step(
            step=number, epoch=1, loss=1.0, learning_rate=number / 1000, gradient_norm=norm,
            tokens=0, tokens_per_second=10.0 * number, step_seconds=0.1,
        )  # fmt: skip

    for record in (step(10, 1.0), step(20, math.nan), step(30, None), step(40, 4.0)):
        reduce(state, record)
    whole = state.series.curves()
    assert whole.gradient_norm == Curve((10, 40), (1.0, 4.0))
    assert whole.learning_rate == Curve((10, 20, 30, 40), (0.01, 0.02, 0.03, 0.04))
    state.series.truncate(20)
    reduce(state, step(30, 3.0))
    assert state.series.curves().units_per_second == Curve((10, 20, 30), (100.0, 200.0, 300.0))


def test_the_loss_of_training_rows_stands_beside_that_of_held_out_rows() -> None:
    evaluations = tuple(msgspec.structs.replace(one, train_loss=0.021) for one in lqr().evaluations)
    run = lqr(evaluations=evaluations)
    marks = [one for one in charts_of(RunView(run))[0].series if one.marker == "◇"]
    assert [one.points for one in marks] == [tuple((float(s), 0.021) for s in range(100, 801, 100))]
    wide, narrow = ("".join(span.text for span in legend(run, False, width)) for width in (100, 60))
    assert "◆ validation 0.03  ┄" in wide
    assert "◇ train rows 0.021 " in wide
    assert "◇" not in narrow, "it is left out before anything is cut"
    rows = {name: text for name, text, _ in summary_rows(RunView(run))}
    assert " · 0.021 on training rows" in rows["validation loss"]


def test_the_chart_of_the_loss_is_named_by_what_the_task_measures() -> None:
    def title(run: RunSnapshot, width: int) -> str:
        return "".join(span.text for span in legend(run, False, width))

    assert title(lqr(), 100).startswith(" masked MSE ")
    language = lqr(plan=Plan())
    assert title(language, 100).startswith(" loss, nats ")
    assert title(language, 40).startswith(" loss ─"), "there is no room for the unit"
