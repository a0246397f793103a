"""Readings of devices as rows: as much of each as all of them leave room for, and reasons never cut first."""

from __future__ import annotations

import re

import pytest

from memconsole.devices.reading import Devices, Missing
from memconsole.plan.plan import Plan
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.draw.lines import plain, width_of
from memconsole.tui.draw.readings import device_lines
from tests.tui.harness import GIB, Console, cpu_reading, finished, readings, screen_text, settle


def text(devices: Devices, width: int, height: int) -> list[str]:
    lines = device_lines(devices, width, height)
    assert all(width_of(line) <= width for line in lines)
    return [plain(line) for line in lines]


@pytest.mark.parametrize(("count", "rows_each"), [(2, 6), (8, 2), (12, 1)])
def test_more_devices_have_fewer_rows_each(count: int, rows_each: int) -> None:
    known = readings(count, temperature_celsius=60.0, power_watts=300.0)
    found = text(known, 78, 22)
    assert len(found) == rows_each * (count + 1) + 2
    for n in range(count):
        assert any(row.strip().startswith(f"cuda:{n} ") for row in found)


@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.parametrize("width", [58, 78, 118])
def test_every_missing_number_of_a_packed_device_says_why(count: int, width: int) -> None:
    known = readings(count, temperature_celsius=60.0, power_watts=Missing("error 999"))
    found = text(known, width, 20)
    assert sum("power n/a — error 999" in row for row in found) == count + 1


@pytest.mark.parametrize("width", [58, 78])
def test_memory_that_is_not_known_leaves_the_columns_in_place(width: int) -> None:
    lost = cpu_reading(id="cuda:9", used_bytes=Missing("GPU lost"), free_bytes=Missing("GPU lost"))
    devices = Devices(devices=(*readings(8).devices, lost))
    found = text(devices, width, 20)
    ends = {len(row) for row in found if re.match(r" (cpu|cuda:\d) ", row)}
    assert ends == {width}
    assert any("n/a / 16.0 GiB" in row for row in found)
    assert any("host RAM n/a — GPU lost" in row for row in found)


async def test_a_run_that_ended_learns_the_host_memory_from_a_late_reading() -> None:
    app = Console(Plan())
    app.readings = None
    run = finished()
    async with app.run_test(size=(120, 40)) as pilot:
        app.run_id = run.id
        app.post_message(SnapshotArrived(run))
        await settle(pilot)
        await pilot.press("t")
        await settle(pilot)
        assert "host RAM process 590 MiB" in screen_text(app)
        assert "of 512 GiB" not in screen_text(app)
        app.set_devices(Devices(devices=(cpu_reading(total_bytes=512 * GIB),)))
        await settle(pilot)
        assert "host RAM process 590 MiB  0.1% of 512 GiB" in screen_text(app)
