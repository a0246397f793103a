"""The final summary: memory as predicted and as measured, and what a run lacked that ran out of it."""

from __future__ import annotations

import msgspec
import pytest

from memconsole.cli.runs.progress import summary
from memconsole.memory.table import Tier
from memconsole.plan.plan import Plan
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.record.log import events
from memconsole.runs.record.states import Verdict
from memconsole.tui.plan.pricing import price
from memconsole.tui.run.summary import summary_rows
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import finished, readings, snapshot

MIB = 2**20


def memory_of(run: RunSnapshot, tier: Tier, band: tuple[int, int]) -> dict[str, tuple[str, str]]:
    """The summary's memory rows as name → (text, role), with a peak of 180 MiB predicted."""
    estimate = price(Plan(), readings()).estimate
    assert estimate is not None
    table = msgspec.structs.replace(
        estimate.table, tier=tier, peak_bytes=180 * MIB, device_bytes=180 * MIB, band_bytes=band
    )
    view = RunView(run, msgspec.structs.replace(estimate, table=table))
    return {name: (text, role) for name, text, role in summary_rows(view)}


@pytest.mark.parametrize("tier", list(Tier))
def test_the_summary_puts_tier_error_and_band_beside_the_measurement(tier: Tier) -> None:
    text, role = memory_of(finished(), tier, (170 * MIB, 190 * MIB))["memory peak"]
    assert text == (
        f"measured 171 MiB · predicted {tier}180 MiB (5 % more), inside its band 170 MiB to 190 MiB"
    )
    assert role == "good"
    text, role = memory_of(finished(), tier, (175 * MIB, 190 * MIB))["memory peak"]
    assert "outside its band" in text
    assert role == "warn"


def test_the_peak_of_a_run_that_died_of_memory_is_only_a_lower_bound() -> None:
    died = snapshot(
        0,
        state="failed",
        verdict=Verdict(reason="out_of_memory", evidence="the log says so"),
        error=events.Error(
            cause="out_of_memory", message="no", held_bytes=171 * MIB, requested_bytes=64 * MIB
        ),
    )
    rows = memory_of(died, Tier.FORMULA, (170 * MIB, 190 * MIB))
    text, _ = rows["memory peak"]
    assert text == "measured ≥ 171 MiB · predicted ~180 MiB, its band 170 MiB to 190 MiB"
    assert rows["out of memory"][0] == (
        "asked for 64.0 MiB more while training: needed at least 235 MiB"
    )
    beyond, role = memory_of(died, Tier.FORMULA, (150 * MIB, 160 * MIB))["memory peak"]
    assert "outside its band" in beyond
    assert role == "warn"


def test_the_peak_of_a_live_run_is_only_a_lower_bound() -> None:
    text, _ = memory_of(snapshot(), Tier.FORMULA, (170 * MIB, 190 * MIB))["memory peak"]
    assert "≥ 171 MiB" in text
    assert "%" not in text


def test_a_graphics_card_has_a_row_for_what_its_driver_charges() -> None:
    started = msgspec.structs.replace(snapshot().facts.started, device_kind="gpu")
    rows = memory_of(
        finished(started=started, peak_device_bytes=185 * MIB),
        Tier.EXACT,
        (170 * MIB, 190 * MIB),
    )
    assert "measured 185 MiB" in rows["device peak"][0]


EVALUATIONS = snapshot().evaluations
NOT_FINITE = msgspec.structs.replace(EVALUATIONS[-1], step=320, loss=None)
LOWER = msgspec.structs.replace(EVALUATIONS[-1], loss=3.1)
EPOCH = events.Epoch(epoch=1, train_loss=4.0, validation_loss=None, minutes=1.25)


@pytest.mark.parametrize(
    ("run", "best", "final", "mark"),
    [
        (snapshot(), "3.877", "3.877", ""),
        (snapshot(missing_records=2), "3.877", "3.877", " ?"),
        (snapshot(evaluations=(*EVALUATIONS, NOT_FINITE)), "3.877", "not finite", ""),
        (finished(evaluations=EVALUATIONS, missing_records=1), "3.202", "3.202", ""),
        (finished(evaluations=(LOWER,)), "3.100", "3.202", ""),
    ],
    ids=["live", "damaged", "not finite", "the last evaluation is missing", "a lower loss is read"],
)
def test_the_command_and_the_console_tell_the_same_figures(
    run: RunSnapshot, best: str, final: str, mark: str
) -> None:
    run = msgspec.structs.replace(run, epochs=(EPOCH,))
    told = {name: text for name, text, _ in summary_rows(RunView(run))}
    first, second, *_ = told["validation loss"].split(" · ")
    assert first == f"best {best}{mark}"
    assert second.removeprefix("final ").removeprefix("n/a — ") == f"{final}{mark}"
    assert told["time"].startswith(f"1.25 min/epoch{mark} · ")
    rows = dict(line.strip().split(": ", 1) for line in summary(run).splitlines() if ": " in line)
    for name, value in (("Best", best), ("Final", final)):
        row = rows[f"{name} validation loss"].strip()
        number = row if value == "not finite" else f"{float(row.split()[0]):.3f}"
        assert number.startswith(value)
        assert row.endswith(" ?") == bool(mark)
    for name in ("Average epoch time", "Total epochs"):
        assert rows[name].endswith(" ?") == bool(mark)
