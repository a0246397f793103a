"""The run screen and the list of runs tell that records are missing, and mark what they may change."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from memconsole.plan.plan import Plan
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.run_store import create_run
from memconsole.tui.draw.comparing_runs import run_rows
from memconsole.tui.draw.lines import plain
from memconsole.tui.run.header import header_lines
from memconsole.tui.run.summary import summary_rows
from memconsole.tui.runs.screen import RunsScreen
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import Console, finished, screen_text, settle, snapshot


def test_the_run_screen_tells_how_many_records_are_missing() -> None:
    sound, damaged = snapshot(), snapshot(missing_records=3)
    assert "missing" not in plain(header_lines(RunView(sound), 100)[0])
    assert "▲ 3 records missing" in plain(header_lines(RunView(damaged), 80)[0])
    rows = {name: text for name, text, _ in summary_rows(RunView(damaged))}
    assert rows["event log"].startswith("3 records are missing or damaged")
    assert rows["validation loss"].count("?") == 2
    assert rows["final train loss"].endswith(" ?")
    assert rows["memory peak"].split(" · ")[0].endswith(" ?")
    assert not any("?" in text for _, text, _ in summary_rows(RunView(sound)))


def test_figures_that_the_trainer_told_at_the_end_are_not_marked() -> None:
    rows = {n: text for n, text, _ in summary_rows(RunView(finished(missing_records=1)))}
    assert rows.pop("event log").startswith("1 record is missing or damaged")
    assert [name for name, text in rows.items() if " ?" in text] == ["memory peak", "host RAM peak"]


def test_runs_side_by_side_are_marked() -> None:
    rows = [plain(line) for line in run_rows([snapshot(), snapshot(missing_records=2)], 100)]
    (best,) = [row for row in rows if row.strip().startswith("best validation")]
    assert best.count("?") == 1
    assert any(row.split()[-2:] == ["0", "2"] for row in rows if "records missing" in row)


async def test_the_list_of_runs_marks_a_damaged_run(make_console: Callable[..., Console]) -> None:
    run = create_run(Plan(), "damaged")
    log = EventWriter(run.attempt_path(run.new_attempt()))
    for step in range(1, 9):
        log.write(msgspec.structs.replace(STEP, step=step))
    log.close()
    (path,) = run.attempt_path(1).glob("events-*.log")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"damaged\n", *lines[4:]]))
    app = make_console()
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("a")
        await settle(pilot)
        assert isinstance(app.screen, RunsScreen)
        assert "2.500?" in screen_text(app)
        assert "? 1 with missing records" in screen_text(app)


STEP = events.Step(
    step=1,
    epoch=1,
    loss=2.5,
    learning_rate=1e-3,
    gradient_norm=1.0,
    tokens=64,
    tokens_per_second=640.0,
    step_seconds=0.1,
)
