"""The plan screen's exact numbers: shown in place when they come, asked for when the keys rest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.memory.table import Tier
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.memory.tracers.thread import TimeLimits
from memconsole.plan import plan as plans
from memconsole.plan import plan_file
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS
from memconsole.runs.record.log import events
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.plan.exact import REST_SECONDS
from memconsole.tui.plan.widgets.memory_table import MemoryTableView
from tests.tui.harness import Console, screen_lines, screen_text, settle, snapshot

Make = Callable[..., Console]
CARD = plans.apply_settings(Plan(), ["model.name=gpt2", "device.name=rtx-4090"])
TRACER = """
import json, os, sys, time
for line in sys.stdin:
    question = json.loads(line)
    full = '"selective"' in question["plan"] or '"full"' in question["plan"]
    with open({log!r}, "a") as log:
        log.write(json.dumps([question["urgent"], question["plan"]]) + "\\n")
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    parts = {{"weights": 475 << 20, "optimizer state": 949 << 20, "activations": 100 << 20}}
    total = sum(parts.values()) + ((3600 if full else 4000) << 20)
    print(json.dumps(dict(id=question["id"], {answer})), flush=True)
"""
FOUND = """exact=dict(phases=dict(backward=dict(total_bytes=total, components=parts)),
        reserved_bytes=total + (64 << 20), source="a tracer of this test", caveat="not a real one")"""


class Tracers:
    """A console whose tracer is a script that answers when its gate opens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gate = folder / "gate"
        self.log = folder / "asked"
        self.log.touch()
        self.books: list[ExactBook] = []

    def attach(self, app: Console, answer: str = FOUND) -> Console:
        source = TRACER.format(log=str(self.log), gate=str(self.gate), answer=answer)
        (self.folder / "gated_tracer.py").write_text(source)
        app.book = ExactBook(
            folder=self.folder / "store",
            tracers=lambda: {"torch": "gated_tracer"},
            environment={**os.environ, "PYTHONPATH": str(self.folder)},
            limits=TimeLimits(superseded=0.2, starting=0.2),
            on_news=app._tell_exact_news,
        )
        self.books.append(app.book)
        return app

    def asked(self) -> list[tuple[bool, Plan]]:
        lines = map(msgspec.json.decode, self.log.read_bytes().splitlines())
        return [(urgent, plan_file.loads(text)) for urgent, text in lines]


@pytest.fixture
def tracers(tmp_path: Path) -> Iterator[Tracers]:
    made = Tracers(tmp_path)
    yield made
    made.gate.touch()
    for book in made.books:
        book.close()


async def until(pilot: Any, what: Callable[[], object]) -> None:
    for _ in range(1200):
        if what():
            return
        await pilot.pause(0.05)
    raise AssertionError("never came true:\n" + screen_text(pilot.app))


def is_exact(app: Console) -> bool:
    found = app.plan_screen.view.estimate
    return found is not None and found.table.tier == Tier.EXACT


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_the_formula_is_there_at_once_and_sharpens_where_it_stands(
    make_console: Make, tracers: Tracers, size: tuple[int, int]
) -> None:
    app = tracers.attach(make_console(CARD))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        view = app.plan_screen.view
        assert view.estimate is not None
        assert view.estimate.table.tier == Tier.FORMULA
        await until(pilot, lambda: app.plan_screen.view.exact.seconds is not None)
        await pilot.pause()
        pending = screen_lines(app)
        assert any(re.search(r"~ refining… \d+ s", line) for line in pending)
        tracers.gate.touch()
        await until(pilot, lambda: is_exact(app))
        await pilot.pause()
        done = screen_lines(app)
        estimate = app.plan_screen.view.estimate
        column = app.plan_screen.query_one(MemoryTableView).region.x
        assert estimate is not None
    assert any("= exact" in line for line in done)
    assert estimate.table.source == "a tracer of this test"
    for name in ("weights", "activations", "allocated", "reserved", "on device", "host RAM"):
        old, new = (next(n for n, line in enumerate(lines) if f" {name}" in line[column :]) for lines in (pending, done))  # fmt: skip
        assert old == new, f"{name} moved"
        place = pending[old].index("~", column)
        mark = "~" if name in ("on device", "host RAM") else "="
        assert done[new][place] == mark, name
    assert not any("outdated" in line or "updating" in line for line in done)
    if size[0] == 160:
        assert any("a tracer of this test · " in line for line in done)


async def test_the_seconds_count_while_it_is_traced(make_console: Make, tracers: Tracers) -> None:
    app = tracers.attach(make_console(CARD))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: (app.plan_screen.view.exact.seconds or 0) >= 2)
        await pilot.pause()
        assert re.search(r"refining… ([2-9]|\d\d+) s", screen_text(app))


async def test_the_plan_is_asked_first_then_what_one_key_press_would_make_of_it(
    make_console: Make, tracers: Tracers
) -> None:
    app = tracers.attach(make_console(CARD))
    key = "optimize.gradient_checkpointing"
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("down")
        await settle(pilot)
        tracers.gate.touch()
        await until(pilot, lambda: len(tracers.asked()) >= 3)
        (urgent, first), (ahead, second), *_ = tracers.asked()
        assert urgent
        assert first == CARD
        assert not ahead
        assert second.optimize.gradient_checkpointing == "selective", "the selected row's first"
        await until(
            pilot,
            lambda: (s := app.plan_screen.view.next_saving(_row(key))) and s.tier == Tier.EXACT,
        )
        await pilot.pause()
        assert any("checkpointing" in line and "=" in line for line in screen_lines(app))
        count = len(tracers.asked())
        await pilot.press(KeyTable().toggle_key(key))
        await settle(pilot)
        estimate = app.plan_screen.view.estimate
        assert estimate is not None
        assert estimate.table.tier == Tier.EXACT, "the key press is already exact"
        assert not any(u for u, _ in tracers.asked()[count:])


def _row(key: str) -> Any:
    from memconsole.plan.toggles.optimizations import BY_KEY

    return BY_KEY[key]


async def test_keys_that_follow_each_other_ask_once(
    make_console: Make, tracers: Tracers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memconsole.tui.plan.exact.REST_SECONDS", 3)
    app = tracers.attach(make_console(CARD))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        for _ in range(4):
            await pilot.press("2")
        await until(pilot, lambda: tracers.asked())
        await pilot.pause(REST_SECONDS)
        assert len(tracers.asked()) == 1
        assert tracers.asked()[0][1] == app.plan_screen.view.plan


async def test_one_key_stops_the_asking_and_asks_again(
    make_console: Make, tracers: Tracers
) -> None:
    app = tracers.attach(make_console(CARD))
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, lambda: app.plan_screen.view.exact.seconds is not None)
        await pilot.press("r")
        await settle(pilot)
        assert app.plan_screen.view.exact.seconds is None
        assert "stopped · r asks" in screen_text(app)
        asked = len(tracers.asked())
        await pilot.press("2")
        await pilot.pause(3 * REST_SECONDS)
        assert len(tracers.asked()) == asked
        tracers.gate.touch()
        await pilot.press("r")
        await until(pilot, lambda: is_exact(app))


async def test_beside_a_run_on_the_processor_it_waits_to_be_told(
    make_console: Make, tracers: Tracers
) -> None:
    from dataclasses import replace

    app = tracers.attach(make_console(CARD))
    started = events.Started(
        attempt=1, backend="torch", versions={}, device_id="cpu", device_name="CPU",
        device_kind="cpu", memory_label="host RAM", platform_lines=(),
    )  # fmt: skip
    app.run_id = "a run"
    app.run_view = replace(app.run_view, snapshot=snapshot(started=started))
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot)
        await pilot.pause(3 * REST_SECONDS)
        assert not tracers.asked()
        assert "a run trains on this CPU" in screen_text(app)
        await pilot.press("r")
        await until(pilot, lambda: tracers.asked())


async def test_why_there_are_no_exact_numbers_is_said_and_the_formula_stays(
    make_console: Make, tracers: Tracers
) -> None:
    tracers.gate.touch()
    app = tracers.attach(make_console(CARD), 'problem="pip install the plugin"')
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, lambda: "pip install the plugin" in screen_text(app))
        assert "not exact" in screen_text(app)
        assert app.plan_screen.view.estimate is not None
        assert not app.plan_screen.view.stale
    small = tracers.attach(make_console(CARD), 'problem="pip install the plugin"')
    async with small.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "~ not exact" in screen_text(small))
        await pilot.press("r")
        await pilot.pause()
        assert "pip install the plugin" in screen_text(small)


def test_what_changed_is_shown_at_one_tier() -> None:
    """The ± column never subtracts a formula's number from an exact one."""
    from memconsole.devices.budget import budget
    from memconsole.memory.estimate import estimate
    from memconsole.memory.exact.sharpen import KnownExact
    from memconsole.memory.exact.timeline import Exact, ExactPhase
    from memconsole.tui.draw.lines import plain
    from memconsole.tui.plan.widgets.memory_table import table_lines
    from memconsole.tui.views.plan_view import PlanView

    device = budget(CARD, None)
    phases = {"backward": ExactPhase(total_bytes=9 << 30, components={"weights": 1 << 30})}
    known = KnownExact(exact=Exact(phases=phases, source="a test"))
    formula, exact = estimate(CARD, device), estimate(CARD, device, lambda *_: known)
    for now, before in ((formula, exact), (exact, formula), (exact, exact)):
        view = PlanView(CARD, estimate=now, before=before.table, stale=False)
        rows = [plain(line) for line in table_lines(view, 36, 20)]
        assert any("allocated" in row for row in rows)
        assert not any("−" in row or "+" in row for row in rows)


async def test_the_console_ends_its_tracer(make_console: Make, tracers: Tracers) -> None:
    import psutil

    before = set(psutil.Process().children())
    app = tracers.attach(make_console(CARD))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: tracers.asked())
        children = set(psutil.Process().children()) - before
        assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


async def test_what_cannot_be_trained_is_marked_and_not_green(
    make_console: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memconsole.tui.plan.widgets.toggles import saving_span

    row = msgspec.structs.replace(BY_KEY["optimize.sharding"], absent={"torch": "one device"})
    rows = tuple(row if r.key == row.key else r for r in OPTIMIZATIONS)
    monkeypatch.setattr("memconsole.memory.estimate.OPTIMIZATIONS", rows)
    app = make_console(plans.replace(CARD, {"device.count": 2}))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        found = app.plan_screen.view.savings_of("optimize.sharding")[1]
        assert not found.available
        assert found.saves_bytes > 0
        span = saving_span(found, False, 10)
        assert span.role == "dim"
        assert span.text.startswith("✗")
        trained = app.plan_screen.view.savings_of("optimize.optimizer")[0]
        assert saving_span(trained, False, 10).role == "good"
        assert saving_span(trained, False, 10).text.startswith("~")
