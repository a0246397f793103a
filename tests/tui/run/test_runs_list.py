"""Lists of very many runs: each is shown, live runs are in it, and what has not changed is not read again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from memconsole.plan.plan import Plan
from memconsole.runs.read.life.newest import newest_live
from memconsole.runs.record import files, labels
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.run_store import create_run
from memconsole.runs.record.states import Verdict
from memconsole.tui.runs import runs_list
from memconsole.tui.runs import screen as runs_screen
from memconsole.tui.runs.runs_list import RunList, list_statuses
from memconsole.tui.runs.screen import RunsScreen
from tests.tui.harness import Console, screen_text, settle


def ended(name: str) -> RunDirectory:
    run = create_run(Plan(), name)
    record = ExitRecord(verdict=Verdict(reason="finished", evidence="test"), time_wall=1.0)
    files.write_struct(run.attempt_path(run.new_attempt()) / "exit.json", record)
    return run


async def test_a_listing_that_takes_long_is_shown_and_the_next_one_waits(
    make_console: Callable[..., Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer is due several times during one listing."""
    ended("alpha")
    at_once: list[int] = []
    running: list[None] = []

    def slow() -> RunList:
        running.append(None)
        at_once.append(len(running))
        time.sleep(0.3)
        running.pop()
        return list_statuses()

    monkeypatch.setattr(runs_screen, "list_statuses", slow)
    app = make_console()
    app.interval_seconds = 0.025
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        begun = time.monotonic()
        app.push_screen(RunsScreen())
        deadline = begun + 10
        while "alpha" not in screen_text(app) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert "alpha" in screen_text(app)
        await asyncio.sleep(1.0)
        assert set(at_once) == {1}
        most = 1 + (time.monotonic() - begun) / 0.6
        assert len(at_once) <= most, "half of the time it rests"


def test_an_ended_run_is_read_again_only_after_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, other = ended("alpha"), ended("beta")
    read: list[str] = []

    def status(run: RunDirectory) -> runs_list.RunStatus:
        read.append(run.id)
        return original(run)

    original = runs_list.status
    monkeypatch.setattr(runs_list, "status", status)
    first = list_statuses()
    assert sorted(read) == sorted([run.id, other.id])
    assert list_statuses() == first
    assert len(read) == 2
    labels.rename(run.path, "gamma", {})
    assert {one.name for one in list_statuses().runs} == {"gamma", "beta"}
    assert read[2:] == [run.id]
    lock = locks.take(run.supervisor_lock)
    try:
        run.new_attempt()
        for _ in range(2):
            assert list_statuses().runs[0].state == "starting"
    finally:
        lock.release()
    assert read[3:] == [run.id, run.id], "a live run is read each time"
    assert {one.state for one in list_statuses().runs} == {"lost", "finished"}
    assert read[5:] == [run.id]


async def test_an_old_run_that_lives_is_listed_first_and_offered(
    make_console: Callable[..., Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = create_run(Plan(), "old but live")
    for number in range(3):
        ended(f"newer {number}")
    monkeypatch.setattr(runs_screen, "list_statuses", lambda: list_statuses(2))
    lock = locks.take(old.supervisor_lock)
    try:
        found = list_statuses(2)
        assert [run.name for run in found.runs] == ["old but live", "newer 2"]
        assert found.total == 4
        assert newest_live() == old
        app = make_console()
        async with app.run_test(size=(100, 30)) as pilot:
            await settle(pilot)
            app.push_screen(RunsScreen())
            await settle(pilot)
            text = screen_text(app)
            assert "old but live" in text
            assert "1 live, 2 of 4 in all" in text
    finally:
        lock.release()
    assert newest_live() is None
