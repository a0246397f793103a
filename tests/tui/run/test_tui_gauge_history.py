"""The gauges' histories on the run screen: where they stand, what they leave, and what a further reading costs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from textual.geometry import Region

from memconsole.memory.table import Estimate
from memconsole.plan.plan import Plan
from memconsole.runs.read.curves.curve import Curve, GaugeCurves
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.draw.lines import plain
from memconsole.tui.plan.pricing import price
from memconsole.tui.run.memory_gauges import MemoryGauges, memory_lines
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import Console, settle, snapshot

MIB = 2**20


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    found = price(Plan(), None).estimate
    assert found is not None
    return found


def on_gpu(run: RunSnapshot) -> RunSnapshot:
    assert run.facts.started is not None
    assert run.facts.memory is not None
    started = msgspec.structs.replace(run.facts.started, device_kind="gpu", memory_label="VRAM")
    memory = msgspec.structs.replace(run.facts.memory, device_bytes=900 * MIB)
    gauges = msgspec.structs.replace(run.gauges, device=run.gauges.host)
    facts = msgspec.structs.replace(run.facts, started=started, memory=memory)
    return msgspec.structs.replace(run, facts=facts, gauges=gauges)


def drawn(run: RunSnapshot, estimate: Estimate | None, height: int) -> list[str]:
    return [plain(line) for line in memory_lines(RunView(run, estimate), 40, height)]


@pytest.mark.parametrize(("gpu", "gauges"), [(False, 2), (True, 3)])
def test_every_gauge_has_its_history_where_there_is_room_for_all(
    estimate: Estimate, gpu: bool, gauges: int
) -> None:
    run = on_gpu(snapshot()) if gpu else snapshot()
    rows = drawn(run, estimate, 30)
    assert sum(row.endswith("▏ 0") for row in rows) == gauges
    assert sum("predicted " in row for row in rows) == gauges
    without = drawn(msgspec.structs.replace(run, gauges=GaugeCurves()), estimate, 30)
    for height in range(1, 30):
        shown = drawn(run, estimate, height)
        found = [row for row in shown if row.endswith("▏ 0")]
        assert len(found) in (0, gauges), height
        assert found or shown == without[:height]


def test_a_run_that_told_nothing_has_no_history(estimate: Estimate) -> None:
    rows = drawn(snapshot(gauges=GaugeCurves(), memory=None), estimate, 30)
    assert not any(row.endswith("▏ 0") for row in rows)


async def test_a_further_reading_repaints_a_column_of_each_history(
    make_console: Callable[..., Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_at(step: int) -> RunSnapshot:
        steps = tuple(range(10, step + 1, 10))
        curve = Curve(steps, tuple(float((300 + s) * MIB) for s in steps))
        return snapshot(340, gauges=GaugeCurves(allocated=curve, host=curve))

    app = make_console()
    async with app.run_test(size=(120, 40)) as pilot:
        app.run_id = run_at(330).id
        app.post_message(SnapshotArrived(run_at(330)))
        await settle(pilot)
        await app.action_show_run()
        await settle(pilot)
        regions: list[Region] = []
        before = MemoryGauges.refresh

        def refresh(self: MemoryGauges, *found: Region, **options: bool) -> MemoryGauges:
            regions.extend(found)
            assert found, "the whole widget is painted again"
            return before(self, *found, **options)

        monkeypatch.setattr(MemoryGauges, "refresh", refresh)
        app.post_message(SnapshotArrived(run_at(340)))
        await settle(pilot)
    assert sum(region.area for region in regions) <= 8
