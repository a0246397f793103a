"""A run that ran out of memory offers what would have saved it, and one key relaunches with it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from memconsole.memory.answers.advice import remedies
from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.control import request
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.run_store import list_runs
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.console import ConsoleApp
from memconsole.tui.plan.dialogs.launching import LaunchScreen
from memconsole.tui.screens.pick import PickScreen
from tests.tui.harness import screen_text, snapshot

OUT = Verdict(
    reason="out_of_memory", evidence="torch: tried to allocate 2 GiB", resumable=True, exit_code=1
)


def a_plan() -> Plan:
    return replace(
        Plan(),
        {
            "device.name": "cpu",
            "train.max_steps": 1,
            "data.max_examples": 20,
            "train.batch_size": 4,
        },
    )


def end(run: RunDirectory, deadline: float) -> None:
    """Kill a run, as soon as there is something to kill."""
    while time.monotonic() < deadline:
        with contextlib.suppress(RunError):
            request(run, "kill", "test")
            return
        time.sleep(0.05)


@pytest.fixture
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


async def shown(app: ConsoleApp, pilot: Any, **changes: Any) -> None:
    from dataclasses import replace as changed

    run = snapshot(plan=a_plan(), state="failed", **changes)
    app.run_id = run.id
    app.set_run_view(changed(app.run_view, snapshot=run))
    await app.action_show_run()
    await pilot.pause()


@pytest.mark.usefixtures("own_runs")
async def test_the_picked_remedy_is_applied_and_launched() -> None:
    from memconsole.devices.budget import budget

    plan = a_plan()
    first = remedies(plan, budget(plan, None))[0]
    app = ConsoleApp(plan)
    async with app.run_test(size=(100, 30)) as pilot:
        await shown(app, pilot, verdict=OUT)
        assert "out_of_memory" in app.screen.conditions()  # type: ignore[attr-defined]
        await pilot.press("f")
        deadline = time.monotonic() + 60
        while not isinstance(app.screen, PickScreen) and time.monotonic() < deadline:
            await pilot.pause(0.05)
        assert isinstance(app.screen, PickScreen)
        assert app.screen._choices[0].label == first.label
        await pilot.press("enter")
        while not isinstance(app.screen, LaunchScreen) and time.monotonic() < deadline:
            await pilot.pause(0.05)
        assert isinstance(app.screen, LaunchScreen), "a launch asks for a name"
        assert "my stories-again" in screen_text(app)
        watched = app.run_id
        while app.run_id == watched and time.monotonic() < deadline:
            if isinstance(app.screen, LaunchScreen):  # a plan that is tight is refused once
                await pilot.press("enter")
            await pilot.pause(0.05)
        launched = list_runs()
        assert [run.id for run in launched] == [app.run_id]
        end(launched[0], deadline)
    assert launched[0].name == "my stories-again"
    relaunched = launched[0].read_plan()
    assert relaunched != plan
    for key, value in first.changes.items():
        section, name = key.split(".")
        assert getattr(getattr(relaunched, section), name) == value


@pytest.mark.usefixtures("own_runs")
async def test_a_run_that_failed_otherwise_offers_none() -> None:
    app = ConsoleApp(a_plan())
    async with app.run_test(size=(100, 30)) as pilot:
        await shown(app, pilot, verdict=Verdict(reason="crashed", evidence="x", resumable=True))
        assert "out_of_memory" not in app.screen.conditions()  # type: ignore[attr-defined]
        await pilot.press("f")
        await pilot.pause()
        assert not isinstance(app.screen, PickScreen)
