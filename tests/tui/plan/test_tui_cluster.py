"""A Slurm cluster in the console: picked among the devices, and a run that waits in its queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memconsole.devices import cluster
from memconsole.devices.cluster import Partition, Partitions
from memconsole.plan.plan import Plan, replace
from memconsole.tui.draw.lines import plain
from memconsole.tui.plan.dialogs import choices
from memconsole.tui.run.header import header_lines
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import Console, screen_text, settle, snapshot

Make = Callable[..., Console]
WAITS = "Slurm job 41 waits in the queue (Resources), expected to begin at 2026-11-23 20:35"


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with one partition of cards."""
    known = Partitions(lambda: (Partition("gpu", 8, "h100", "96", "2-00:00:00", "4"),))
    known.latest(10)
    monkeypatch.setattr(cluster, "PARTITIONS", known)
    monkeypatch.setattr(choices, "PARTITIONS", known)


async def test_a_picked_partition_trains_there_and_a_picked_device_of_this_machine_here(
    partitions: None, make_console: Make
) -> None:
    app = make_console()
    async with app.run_test(size=(120, 30)) as pilot:
        for typed, on, device in (
            ("slurm:gpu", "slurm", "h100-80gb"),
            ("a100-80gb", "slurm", "a100-80gb"),
            ("auto", "here", "auto"),
        ):
            await settle(pilot)
            await pilot.press("v")
            await settle(pilot)
            if on == "slurm" and device == "h100-80gb":
                assert "4 nodes with 8 × h100, 96 cores" in screen_text(app)
            await pilot.press(*typed)
            await settle(pilot)
            await pilot.press("enter")
            await settle(pilot)
            plan = app.plan_screen.view.plan
            assert (plan.launch.on, plan.device.name) == (on, device)
            assert ("a Slurm job in gpu" in screen_text(app)) == (on == "slurm")


def test_the_run_screen_says_why_a_job_waits_and_where_it_trains() -> None:
    plan = replace(Plan(), {"launch.on": "slurm", "device.name": "cpu"})
    waits = RunView(snapshot(state="queued", plan=plan, job=WAITS))
    first, second = map(plain, header_lines(waits, 120)[:2])
    assert first.startswith(" ◌ queued ")
    assert second.strip() == WAITS
    trains = RunView(snapshot(plan=plan, job="Slurm job 41 on n1"))
    assert "· Slurm job 41 on n1" in plain(header_lines(trains, 120)[0])
