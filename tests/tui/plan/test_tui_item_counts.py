"""The plan screen counts the items of large ratings meanwhile, and then shows the size of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan import catalog
from memconsole.plan.catalog import item_counts
from memconsole.plan.plan import Plan, replace
from memconsole.tui.plan import counting
from tests.tui.harness import Console, screen_text

Make = Callable[..., Console]


async def until(pilot: Any, holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        await pilot.pause(0.05)
    raise AssertionError("it did not come")


async def test_a_number_is_assumed_until_the_items_are_counted(
    make_console: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(item_counts, "SMALL_BYTES", 0)
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,time\n" + "".join(f"a,{n},{n}\n" for n in range(30)))
    changes = {"data.source": str(path), "device.name": "cpu"}
    begun = asyncio.Event()

    async def later(plan: Plan, name: str) -> bool:
        await begun.wait()
        return await counting.counted(plan, name)

    monkeypatch.setattr("memconsole.tui.plan.priced_screen.counted", later)
    app = make_console(replace(catalog.preset("efficientids"), changes))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "items assumed" in screen_text(app))
        begun.set()
        await until(pilot, lambda: "items assumed" not in screen_text(app))
        assert app.plan_screen.view.estimate is not None
        assert app.plan_screen.view.estimate.parameters == sum(
            p.size for p in catalog.model(app.plan_screen.view.plan).parameters()
        )
