"""Pictures of what really happens: exact numbers being traced, runs that train, end, and run out of memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from picture import SIZES, name_of, shoot
from scenes import CARD

from memconsole.tui.app.console import ConsoleApp

RUN = (
    "train.max_steps=240", "train.epochs=3", "train.evaluate_every=60", "data.max_examples=40",
    "data.sequence_length=64", "train.batch_size=8", "train.sample_tokens=32", "device.name=cpu",
)  # fmt: skip
LONG = (*RUN, "train.max_steps=900", "train.epochs=9", "train.evaluate_every=150")
SEVERAL = (
    *RUN, "train.max_steps=200", "train.evaluate_every=50", "device.count=4", "train.batch_size=2",
    "optimize.sharding=fsdp", "optimize.heap=tight",
)  # fmt: skip
HYBRID = ("train.max_steps=600", "device.name=cpu")
SHORT = (*RUN, "train.max_steps=90", "train.evaluate_every=15")
ALLOWED_BYTES = 60 * 2**20
SYSTEMS = {
    "lqr": ("lqr", "lqr.h5", "20k", ("train.max_steps=600", "train.evaluate_every=100"), ()),
    "efficientids": ("ratings", "ratings", "20k", ("train.epochs=3", "train.batch_size=4"), ()),
}
"""By preset: kind, file and size of its data, settings that shorten the run, and keys to press before its picture."""


async def exact(folder: Path) -> None:
    """The plan screen while its step is traced, and with the numbers of the trace and of its neighbours."""
    from memconsole.memory.table import Tier
    from memconsole.plan.plan import Plan, apply_settings

    for size in SIZES:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            app = ConsoleApp(apply_settings(Plan(), CARD), slow_link=False)
            async with app.run_test(size=size) as pilot:
                await devices_known(app, pilot)
                while (app.plan_screen.view.exact.seconds or 0) < 1:
                    await pilot.pause(0.1)
                await shoot(app, pilot, folder / name_of("plan-exact-pending", size))
                for _ in range(600):
                    await pilot.pause(0.2)
                    found = app.plan_screen.view.estimate
                    ahead = (
                        {s.key for s in found.savings if s.tier == Tier.EXACT} if found else set()
                    )
                    if {"optimize.precision", "optimize.fused_loss", "optimize.lora_rank"} <= ahead:
                        break
                await shoot(app, pilot, folder / name_of("plan-exact-done", size))


async def training(folder: Path) -> None:
    """A run from its middle to its end."""
    run = launched("stories on the standard library", LONG)
    await until(run, lambda snapshot: snapshot.facts.step >= 320)
    for size in SIZES:
        await watched(run, folder, size, "run-live")
    await watched(run, folder, SIZES[-1], "run-live-light", "memconsole-light")
    if not await until(run):
        raise RuntimeError("the run ended before its pictures were taken: make it longer")
    for size in SIZES:
        await watched(run, folder, size, "run-finished", keys={"a": "runs"})


async def several(folder: Path) -> None:
    """A run of four processes on one CPU, each with its memory."""
    run = launched("four processes", SEVERAL)
    await until(run, lambda snapshot: snapshot.facts.step >= 60 and snapshot.facts.phase == "train")
    for size in SIZES:
        await watched(run, folder, size, "run-ranks")
    if not await until(run):
        raise RuntimeError("the run ended before its pictures were taken: make it longer")


async def hybrid(folder: Path) -> None:
    """A hybrid run after its first jumps."""
    run = launched("hybrid", HYBRID, "--preset", "hybrid")
    await until(run, lambda snapshot: snapshot.facts.jump is not None and snapshot.facts.step > 190)
    for size in SIZES:
        await watched(run, folder, size, "run-hybrid")
    if not await until(run):
        raise RuntimeError("the run ended before its pictures were taken: make it longer")


async def comparing(folder: Path) -> None:
    """Two runs' curves over each other."""
    from memconsole.runs.record.run_store import list_runs

    rates = ("2e-3", "2e-4")
    runs = [launched(f"rate {rate}", (*SHORT, f"train.learning_rate={rate}")) for rate in rates]
    for run in runs:
        await until(run)
    for size in SIZES:
        app = ConsoleApp(slow_link=False)
        async with app.run_test(size=size) as pilot:
            await devices_known(app, pilot)
            await pilot.press("a")
            await listing(app, pilot, "runs", len(list_runs()))
            await pilot.press("space", "space", "c")  # each moves on to the next run
            await listing(app, pilot, "compare", len(runs))
            await shoot(app, pilot, folder / name_of("compare-runs", size))


async def out_of_memory(folder: Path) -> None:
    """A run that dies of memory, and what would have helped."""
    import psutil

    fraction = ALLOWED_BYTES / psutil.virtual_memory().total
    settings = (*RUN, f"device.memory_fraction={fraction}", "train.batch_size=64")
    run = launched("too large", settings, "--force")
    await until(run)
    for size in SIZES:
        # The summary in place of the output, which names this machine's folders.
        await watched(
            run, folder, size, "run-out-of-memory", before=("o", "o"), keys={"f": "remedies"}
        )


async def systems(folder: Path) -> None:
    """Runs of two systems, each with its own measures."""
    into = folder.absolute()
    # The presets look for their data in the current folder.
    with tempfile.TemporaryDirectory() as data, contextlib.chdir(data):
        for preset, (kind, name, much, settings, keys) in SYSTEMS.items():
            words = ["data", "make", kind, name, "--size", much]
            subprocess.run([sys.executable, "-m", "memconsole", *words], check=True)
            chosen = (*settings, "backend=jax", "device.name=cpu")
            run = launched(preset, chosen, "--preset", preset)
            await until(run)
            for size in SIZES:
                await watched(run, into, size, f"run-{preset}", before=keys)


STORIES: dict[str, Callable[[Path], Awaitable[None]]] = {
    "exact": exact, "training": training, "comparing": comparing, "out-of-memory": out_of_memory,
    "systems": systems, "several": several, "hybrid": hybrid,
}  # fmt: skip

_BOTH = {
    "exact": ("plan-exact-pending", "plan-exact-done"),
    "training": ("run-live", "run-finished", "runs"),
    "several": ("run-ranks",),
    "hybrid": ("run-hybrid",),
    "comparing": ("compare-runs",),
    "out-of-memory": ("run-out-of-memory", "remedies"),
    "systems": ("run-lqr", "run-efficientids"),
}
PICTURES = {
    story: tuple(name_of(name, size) for name in names for size in SIZES)
    for story, names in _BOTH.items()
}
"""What each story draws."""
PICTURES["training"] += (name_of("run-live-light", SIZES[-1]),)


def launched(name: str, settings: tuple[str, ...], *options: str) -> str:
    """The id of a run that was started."""
    chosen = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "memconsole", "train", "--detach", *options, "--name", name, *chosen],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


async def until(run: str, far_enough: Callable[[Any], bool] = lambda _: False) -> bool:
    """Wait until the run is far enough, or has ended. Whether it went on for a moment."""
    from memconsole.runs.read.follow import Follower
    from memconsole.runs.record.run_store import find_run
    from memconsole.runs.record.states import LIVE

    follower = Follower(find_run(run))
    waited = False
    while (snapshot := follower.poll()).state in LIVE and not far_enough(snapshot):
        waited = True
        await asyncio.sleep(0.5)
    return waited


async def watched(
    run: str, folder: Path, size: tuple[int, int], name: str, theme: str | None = None, *,
    before: tuple[str, ...] = (), keys: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The run screen as it is now after keys, then the screen that each of `keys` leads to."""
    app = ConsoleApp(attach=run, slow_link=False)
    async with app.run_test(size=size) as pilot:
        if theme is not None:
            app.theme = theme
        await devices_known(app, pilot)
        await shown(pilot, lambda: app.run_view.snapshot is not None)
        await shown(
            pilot,
            lambda: bool(app.run_view.prediction or app.run_view.prediction_problem),
        )
        await pilot.press(*before)
        await shoot(app, pilot, folder / name_of(name, size))
        for key, leads_to in (keys or {}).items():
            await pilot.press(key)
            other = {"remedies": "pick"}.get(leads_to, leads_to)
            await listing(app, pilot, other)
            await shoot(app, pilot, folder / name_of(leads_to, size))


async def listing(app: ConsoleApp, pilot: Any, name: str, least: int = 1) -> None:
    """Wait until the screen called `name` is on top and lists so much."""
    await shown(
        pilot,
        lambda: getattr(app.screen, "SCREEN", "") == name and len(listed(app)) >= least,
    )


def listed(app: ConsoleApp) -> Sequence[Any]:
    """What the list on top shows: runs, or choices."""
    found: Sequence[Any] = getattr(app.screen, "_runs", None) or getattr(app.screen, "_found", ())
    return found


async def shown(pilot: Any, condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until `condition` holds, and for the next frame. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the screen did not get there")
        await pilot.pause(0.05)
    await pilot.pause(0.2)


async def devices_known(app: ConsoleApp, pilot: Any) -> None:
    """Wait for the first reading of the probe."""
    for _ in range(200):
        if app.devices is not None:
            break
        await pilot.pause(0.05)
    await pilot.pause(0.5)
