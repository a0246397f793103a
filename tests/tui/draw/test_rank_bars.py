"""The memory of all ranks: bars of few, a strip of many, and what is named."""

from __future__ import annotations

from typing import Any

import pytest

from memconsole.devices.reading import Missing
from memconsole.plan.plan import Plan
from memconsole.plan.plan import replace as replaced
from memconsole.runs.read.state.ranks import Slowest
from memconsole.tui.draw.gauges import Gauge
from memconsole.tui.draw.lines import plain, width_of
from memconsole.tui.draw.ranks import RankGauge, rank_head, rank_lines, rank_title
from memconsole.tui.run.memory_gauges import MemoryGauges, memory_lines
from memconsole.tui.run.run_gauges import run_gauges
from memconsole.tui.views.run_view import RunView
from tests.tui.harness import snapshot, with_ranks

GIB = 2**30


def ranks(*held: int, **changes: Any) -> list[RankGauge]:
    """Ranks that hold so many GiB, of 24."""
    values: dict[str, Any] = {
        "label": "VRAM tensors", "total": 24 * GIB, "limit": 24 * GIB, "predicted": 15 * GIB
    }  # fmt: skip
    values |= changes
    return [
        RankGauge(n, Gauge(used=size * GIB, peak=(size + 1) * GIB, **values), 0.5)
        for n, size in enumerate(held)
    ]


def text(drawn: list[RankGauge], slow: Slowest | None = None, width: int = 36) -> list[str]:
    return [plain(line) for line in rank_lines(drawn, slow, width)]


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("width", [24, 36, 46, 100])
def test_each_of_few_ranks_has_a_bar_on_one_scale(count: int, width: int) -> None:
    drawn = ranks(*[12] * (count - 1), 6)
    lines = rank_lines(drawn, None, width)
    assert len(lines) == count + 1
    assert all(width_of(line) <= width for line in lines)
    rows = [plain(line) for line in lines]
    assert [row.count("┃") for row in rows[:count]] == [1] * count
    assert len({row.index("┃") for row in rows[:count]}) == 1, "the prediction is at one place"
    assert rows[0].count("█") > 1.5 * rows[count - 1].count("█")
    assert "12.0 GiB" in rows[0]
    assert "6.00 GiB" in rows[count - 1]


@pytest.mark.parametrize("width", [24, 36, 46, 100])
def test_sixty_four_ranks_are_a_strip_that_names_highest_and_lowest(width: int) -> None:
    held = [10] * 64
    held[41], held[7] = 20, 3
    lines = rank_lines(ranks(*held), Slowest(12, 0.18), width)
    rows = [plain(line) for line in lines]
    assert all(width_of(line) <= width for line in lines)
    assert len(rows) <= 8 + 3
    cells = "".join(c for row in rows[:-3] for c in row[3:] if c in "▁▂▃▄▅▆▇█")
    assert len(cells) == 64
    assert cells[41] == max(cells)
    assert cells[7] == min(cells)
    assert "peak 21.0 GiB (rank 41)" in rows[-3]
    assert "lowest peak 4.00 GiB" in rows[-2]
    assert rows[-1].startswith("▲slowest rank 12")


def test_a_strip_of_a_wide_terminal_has_longer_rows() -> None:
    drawn = ranks(*[10] * 64)
    rows = [len(text(drawn, width=width)) - 2 for width in (24, 36, 46, 100)]
    assert rows == [4, 4, 2, 1]


def test_the_fullest_rank_has_a_warning_colour_of_its_own() -> None:
    lines = rank_lines(ranks(12, 20, 23), None, 46)
    roles = [{span.role for span in line if "█" in span.text} for line in lines[:3]]
    assert roles == [{"good"}, {"warn"}, {"bad"}]
    strip = rank_lines(ranks(*[12] * 8, 20, 23), None, 46)[0]
    assert [span.role for span in strip][-2:] == ["warn", "bad"]


def test_a_slow_rank_is_marked_and_one_that_is_hardly_slower_is_only_named() -> None:
    rows = text(ranks(12, 12), Slowest(1, 0.18))
    assert rows[1].startswith("▲rank 1")
    assert rows[0].startswith(" rank 0")
    assert rows[-1] == "▲slowest rank 1: others wait 18 %"
    rows = text(ranks(12, 12), Slowest(1, 0.03))
    assert "▲" not in "".join(rows)
    assert rows[-1] == " slowest rank 1: others wait 3 %"


def test_a_rank_that_told_nothing_says_so_and_one_that_died_when_it_did_last() -> None:
    alive, dead = ranks(12, 11)
    missing = RankGauge(2, Gauge("VRAM tensors", Missing("has told nothing yet"), 24 * GIB))
    silent = RankGauge(1, dead.gauge, silent_since=120)
    rows = text([alive, silent, missing], width=46)
    assert "at step 120" in rows[1]
    assert "n/a — has told nothing yet" in rows[2]
    assert "peak 13.0 GiB (rank 0)" in rows[3]
    many = text([alive, silent, missing, *ranks(*[12] * 9)[3:]], width=46)
    assert "·" in many[0]


def test_no_rank_has_told_anything() -> None:
    missing = [RankGauge(n, Gauge("VRAM", Missing("no reading"), Missing("?"))) for n in range(64)]
    assert len(text(missing)) == 4


@pytest.mark.parametrize("width", [24, 36, 46])
def test_the_title_keeps_number_and_scale(width: int) -> None:
    drawn = ranks(*[12] * 64)
    title = rank_title(drawn, width)
    assert "64 ranks, to 24.0 GiB" in title
    assert ("tensors" in title) == (width >= 37)
    assert width_of(rank_head(drawn, width)) <= width


def test_the_section_of_eight_ranks_leaves_a_row_for_the_speed_at_80x24() -> None:
    lines = MemoryGauges()
    lines._view = RunView(with_ranks(8))
    rows = [plain(line) for line in lines.draw(37, 12)]
    assert len(rows) == 12
    assert "of 8 ranks" in rows[0]
    assert "5,230 · 654" in rows[-1]


def test_the_speed_is_told_in_all_and_for_each_device_of_several_only() -> None:
    widget = MemoryGauges()
    widget._view = RunView(with_ranks(8))
    many = [plain(line) for line in widget.draw(46, 40)]
    assert any("tokens/s" in row and "5,230" in row for row in many)
    assert any("each device" in row and "654" in row for row in many)
    widget._view = RunView(snapshot())
    assert not any("each" in plain(line) for line in widget.draw(46, 40))


def test_gauges_beside_the_ranks_are_whole_and_of_the_fullest_rank() -> None:
    view = RunView(with_ranks(8))
    for height in range(1, 48):
        rows = [plain(line) for line in memory_lines(view, 46, height)]
        assert len(rows) <= height
        heads = sum(", fullest rank" in row for row in rows)
        assert sum(row.startswith(" peak ") for row in rows) >= heads
    assert heads == 2
    assert any("VRAM, fullest rank 1.37 GiB" in row for row in rows)


@pytest.mark.parametrize(
    ("apart", "label"), [(4, "1/4 of host RAM"), (2, "1/2 of host RAM"), (1, "host RAM")]
)
def test_the_gauge_of_a_heap_that_devices_share_says_that_it_is_a_share(
    apart: int, label: str
) -> None:
    plan = replaced(
        Plan(),
        {
            "backend": "jax",
            "device.name": "cpu",
            "device.count": 4,
            "launch.devices_per_node": apart,
            "optimize.sharding": "fsdp",
        },
    )
    run = snapshot(820, plan=plan)
    (gauge, _) = run_gauges(RunView(run))
    assert gauge.label == f"{label} tensors"
