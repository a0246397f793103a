"""Every main screen in its states at two sizes, as text kept in `snapshots/`.

After a wanted change: ``MEMCONSOLE_SNAPSHOTS=write pytest tests/tui/test_tui_snapshots.py``, then read the difference.
Numbers are given, not priced, so that a better formula changes nothing here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memconsole.devices.reading import Devices, Missing
from memconsole.memory.formula import PHASES
from memconsole.memory.table import (
    COMPONENTS,
    Component,
    Estimate,
    HostBytes,
    MemoryTable,
    Saving,
    Tier,
)
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.plan.plan import replace as replaced
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.record.log import events
from memconsole.runs.record.states import Verdict
from memconsole.tui.app.messages import SnapshotArrived
from memconsole.tui.plan.pricing import Priced
from memconsole.tui.runs import screen as runs_screen
from memconsole.tui.runs.runs_list import RunList
from tests.tui.harness import (
    Console,
    cpu_reading,
    finished,
    readings,
    screen_lines,
    settle,
    snapshot,
    with_ranks,
)

FOLDER = Path(__file__).parent / "snapshots"
SIZES = ((80, 24), (120, 40))
MIB, GIB = 2**20, 2**30
NOW = 1_800_000_000.0
BUDGET = Budget(
    name="GPU 0", kind="gpu", memory_label="VRAM", total_bytes=24 * GIB, usable_bytes=22 * GIB,
    why="free now", local=True, peak_flops={"fp32": 2e13},
)  # fmt: skip


def given(plan: Plan, factor: int = 1) -> Estimate:
    """Numbers of no plan in particular."""
    components = tuple(
        Component(name, {phase: factor * (n + 2) * (p + 9) * MIB for p, phase in enumerate(PHASES)})
        for n, name in enumerate(COMPONENTS)
    )
    phases = {phase: sum(c.at(phase) for c in components) for phase in PHASES}
    peak = max(phases, key=lambda phase: phases[phase])
    most = phases[peak]
    table = MemoryTable(
        backend="torch", budget=BUDGET, tier=Tier.FORMULA, components=components, phases=phases,
        peak_phase=peak, peak_bytes=most, reserved_bytes=most + 80 * MIB, device_bytes=most + 400 * MIB,
        host=HostBytes(3 * GIB), band_bytes=(most + 300 * MIB, most + 520 * MIB), band_from="runs of this setup",
    )  # fmt: skip
    savings = tuple(
        Saving(
            key=row.key,
            value=row.next_value(plan),
            saves_bytes=(17 * n % 9 - 2) * 40 * MIB,
            time_factor=1 + n / 50,
            reason="" if 17 * n % 9 != 2 else "the peak is elsewhere",
        )
        for n, row in enumerate(OPTIMIZATIONS)
    )
    return Estimate(
        table=table, savings=savings, parameters=124_000_000, trainable_parameters=124_000_000,
        step_seconds=0.25, tokens_per_second=8192.0, peak_tokens_per_second=32768.0,
        epoch_minutes=12.5,
    )  # fmt: skip


LISTED: list[RunStatus] = []
"""The runs that are found."""


@pytest.fixture(autouse=True)
def _given_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(plan: Plan, devices: Any, lookup: Any = None) -> Priced:
        if plan.train.batch_size == 999:
            return Priced(plan, None, "train.batch_size = 999: a reason in one line", 0.0)
        return Priced(plan, given(plan, 1 if plan.train.batch_size < 64 else 40), "", 0.0)

    monkeypatch.setattr("memconsole.tui.plan.priced_screen.price", price)
    monkeypatch.setattr("memconsole.tui.run.predictions.price", price)
    monkeypatch.setattr(runs_screen.time, "time", lambda: NOW)
    LISTED.clear()
    monkeypatch.setattr(runs_screen, "list_statuses", lambda: RunList(tuple(LISTED), len(LISTED)))
    # Nothing that comes after a while.
    monkeypatch.setattr("memconsole.tui.plan.exact.REST_SECONDS", 1e6)


def status(name: str, state: Any, step: int, **changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "id": f"20270115-08000{step % 10}-abcdef", "name": name, "state": state, "phase": "train", "step": step,
        "total_steps": 1200, "loss": 3.25, "backend": "torch", "model": "gpt2",
        "created_wall": NOW - 7200,
    }  # fmt: skip
    return RunStatus(**(values | changes))


OUT_OF_MEMORY = {
    "state": "failed",
    "verdict": Verdict(reason="out_of_memory", evidence="the log says so", resumable=True),
    "error": events.Error(
        cause="out_of_memory", message="tried to allocate 2.00 GiB", held_bytes=20 * GIB,
        requested_bytes=2 * GIB,
    ),
}  # fmt: skip
GPUS = readings(8)
SILENT = Devices(
    devices=(
        cpu_reading(
            used_bytes=Missing("no permission"), total_bytes=Missing("no permission"),
            utilization_percent=Missing("no permission"), processes=(),
        ),
    ),
    notes=("NVIDIA: the driver does not answer", "AMD: no amdgpu device"),
)  # fmt: skip


class Scene:
    """A console, taken to a screen in a state."""

    def __init__(self, app: Console, pilot: Any) -> None:
        self.app, self.pilot = app, pilot

    async def run(self, run: RunSnapshot, *keys: str) -> None:
        self.app.run_id = run.id
        self.app.post_message(SnapshotArrived(run))
        await settle(self.pilot)
        await self.keys("t", *keys)

    async def keys(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await settle(self.pilot)

    async def runs(self, *found: RunStatus) -> None:
        LISTED[:] = found
        await self.keys("a")

    async def priced(self, **settings: Any) -> None:
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        self.app.plan_screen.change(lambda plan: replaced(plan, changes))
        await settle(self.pilot)


async def nothing(scene: Scene) -> None: ...


async def busy_plan(scene: Scene) -> None:
    await scene.run(snapshot())
    await scene.keys("p", "2")


SCENES: dict[str, tuple[Devices | None, Callable[[Scene], Any]]] = {
    "plan-empty": (None, nothing),
    "plan-running": (readings(), busy_plan),
    "plan-failed": (readings(), lambda s: s.priced(train__batch_size=999)),
    "plan-too-large": (readings(), lambda s: s.priced(train__batch_size=64)),
    "plan-8-devices": (GPUS, nothing),
    "run-starting": (readings(), lambda s: s.run(snapshot(0, state="starting", memory=None, peak_bytes=None, peak_host_bytes=None, epochs=()))),
    "run-running": (readings(), lambda s: s.run(snapshot(820))),
    "run-paused": (readings(), lambda s: s.run(snapshot(820, phase="paused", pause_requested=True))),
    "run-failed": (readings(), lambda s: s.run(snapshot(340, **OUT_OF_MEMORY), "o", "o")),
    "run-finished": (readings(), lambda s: s.run(finished())),
    "run-8-devices": (GPUS, lambda s: s.run(snapshot(820))),
    "run-8-ranks": (GPUS, lambda s: s.run(with_ranks(8))),
    "run-64-ranks": (GPUS, lambda s: s.run(with_ranks(64))),
    "runs-empty": (readings(), lambda s: s.runs()),
    "runs-running": (readings(), lambda s: s.runs(status("tonight", "running", 301), status("older", "finished", 1200))),
    "runs-failed": (readings(), lambda s: s.runs(status("no room", "failed", 7, loss=None, resumable=True), status("gone", "lost", 8))),
    "devices-empty": (None, lambda s: s.keys("g")),
    "devices-failed": (SILENT, lambda s: s.keys("g")),
    "devices-8-devices": (GPUS, lambda s: s.keys("g")),
    "help-plan": (readings(), lambda s: s.keys("question_mark")),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", SCENES)
async def test_the_screen_is_as_it_was(name: str, size: tuple[int, int]) -> None:
    devices, take = SCENES[name]
    app = Console(Plan())
    app.readings = devices
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await take(Scene(app, pilot))
        await settle(pilot)
        seen = "\n".join(line.rstrip() for line in screen_lines(app)) + "\n"
    path = FOLDER / f"{name}-{size[0]}x{size[1]}.txt"
    if os.environ.get("MEMCONSOLE_SNAPSHOTS") == "write":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(seen, encoding="utf-8")
    assert seen == path.read_text(encoding="utf-8")


def test_no_snapshot_is_left_over() -> None:
    wanted = {f"{name}-{width}x{height}.txt" for name in SCENES for width, height in SIZES}
    assert {path.name for path in FOLDER.iterdir()} == wanted
