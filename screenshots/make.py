"""``make screenshots``: drive the real console through a real run and write its screens as SVG and PNG.

Runs go to a state folder of their own, which is removed. PNG needs a monospace font with braille on
the system (DejaVu Sans Mono has it).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SIZES = ((80, 24), (160, 48))
FONT = "DejaVu Sans Mono"
RUN = (
    "train.max_steps=240", "train.epochs=3", "train.evaluate_every=60", "data.max_examples=40",
    "data.sequence_length=64", "train.batch_size=8", "train.sample_tokens=32", "device.name=cpu",
)  # fmt: skip
CARD = ("model.name=gpt2", "data.sequence_length=512", "train.batch_size=8", "device.name=rtx-4090")
ALLOWED_BYTES = 60 * 2**20
TOO_LARGE = ("model.name=llama-3.2-1b", "data.sequence_length=1024", "device.name=rtx-3060-12gb")


async def shoot(app, pilot, name: str) -> None:  # type: ignore[no-untyped-def]
    """Write the screen as NAME.svg and NAME.png."""
    import resvg_py

    await pilot.pause()
    svg = app.export_screenshot(title="memconsole")
    (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")
    drawn = svg.replace("Fira Code", FONT)
    png = resvg_py.svg_to_bytes(svg_string=drawn, monospace_family=FONT, font_family=FONT)
    (FOLDER / f"{name}.png").write_bytes(bytes(png))
    print(name, flush=True)


async def plans(columns: int, rows: int) -> None:
    """The plan screen: fits, toggling, does not fit, help."""
    from memconsole.plan import catalog, plan
    from memconsole.tui.app import ConsoleApp

    size = f"{columns}x{rows}"
    app = ConsoleApp(catalog.default_plan(), slow_link=False)
    async with app.run_test(size=(columns, rows)) as pilot:
        await devices_known(app, pilot)
        await shoot(app, pilot, f"plan-fits-{size}")
        await pilot.press("2", "2", "5")
        await shoot(app, pilot, f"plan-toggled-{size}")
        await pilot.press("question_mark")
        await pilot.pause(0.5)
        await shoot(app, pilot, f"help-{size}")
    large = plan.apply_settings(plan.Plan(), TOO_LARGE)
    app = ConsoleApp(large, slow_link=False)
    async with app.run_test(size=(columns, rows)) as pilot:
        await devices_known(app, pilot)
        await shoot(app, pilot, f"plan-does-not-fit-{size}")


async def exact(columns: int, rows: int) -> None:
    """The plan screen while its step is traced, and with the numbers of the trace and of its neighbours."""
    from memconsole.memory.table import Tier
    from memconsole.plan import plan
    from memconsole.tui.app import ConsoleApp

    size = f"{columns}x{rows}"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        app = ConsoleApp(plan.apply_settings(plan.Plan(), CARD), slow_link=False)
        async with app.run_test(size=(columns, rows)) as pilot:
            await devices_known(app, pilot)
            while (app.plan_screen.view.exact.seconds or 0) < 1:
                await pilot.pause(0.1)
            await shoot(app, pilot, f"plan-exact-pending-{size}")
            for _ in range(600):
                await pilot.pause(0.2)
                found = app.plan_screen.view.estimate
                ahead = {s.key for s in found.savings if s.tier == Tier.EXACT} if found else set()
                if {"optimize.precision", "optimize.fused_loss", "optimize.lora_rank"} <= ahead:
                    break
            await shoot(app, pilot, f"plan-exact-done-{size}")


async def devices_known(app, pilot) -> None:  # type: ignore[no-untyped-def]
    """Wait for the first reading of the probe."""
    for _ in range(200):
        if app.devices is not None:
            break
        await pilot.pause(0.05)
    await pilot.pause(0.5)


async def watching(run: str, columns: int, rows: int, name: str, theme: str | None = None) -> None:
    """The run screen as it is now."""
    from memconsole.tui.app import ConsoleApp

    app = ConsoleApp(attach=run, slow_link=False)
    async with app.run_test(size=(columns, rows)) as pilot:
        if theme is not None:
            app.theme = theme
        await devices_known(app, pilot)
        await pilot.pause(2.5)
        await shoot(app, pilot, f"{name}-{columns}x{rows}")
        if name == "run-finished":
            await pilot.press("a")
            await pilot.pause(1.0)
            await shoot(app, pilot, f"runs-{columns}x{rows}")
            await pilot.press("g")
            await pilot.pause(1.0)
            await shoot(app, pilot, f"devices-{columns}x{rows}")


async def out_of_memory() -> None:
    """A run that dies of memory, and what would have helped."""
    import psutil

    from memconsole.runs.directory import find_run
    from memconsole.runs.follow import Follower
    from memconsole.runs.snapshot import LIVE
    from memconsole.tui.app import ConsoleApp

    fraction = ALLOWED_BYTES / psutil.virtual_memory().total
    settings = [
        part
        for setting in (*RUN, f"device.memory_fraction={fraction}", "train.batch_size=64")
        for part in ("--set", setting)
    ]
    run = memconsole("train", "--detach", "--force", "--name", "too large", *settings)
    follower = Follower(find_run(run))
    while follower.poll().state in LIVE:
        await asyncio.sleep(0.5)
    for columns, rows in SIZES:
        app = ConsoleApp(attach=run, slow_link=False)
        async with app.run_test(size=(columns, rows)) as pilot:
            await devices_known(app, pilot)
            await pilot.pause(2.0)
            await pilot.press("o", "o")  # the summary: output names this machine's folders
            await shoot(app, pilot, f"run-out-of-memory-{columns}x{rows}")
            await pilot.press("f")
            await pilot.pause(4.0)
            await shoot(app, pilot, f"remedies-{columns}x{rows}")


def memconsole(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "memconsole", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


async def planning() -> None:
    """The plan screens."""
    for size in SIZES:
        await plans(*size)
        await exact(*size)


async def training() -> None:
    """A run from its middle to its end."""
    from memconsole.runs.directory import find_run
    from memconsole.runs.follow import Follower
    from memconsole.runs.snapshot import LIVE

    settings = [part for setting in RUN for part in ("--set", setting)]
    run = memconsole("train", "--detach", "--name", "stories on the standard library", *settings)
    follower = Follower(find_run(run))
    while (snapshot := follower.poll()).step < 150 and snapshot.state in LIVE:
        await asyncio.sleep(0.5)
    for size in SIZES:
        await watching(run, *size, "run-live")
    await watching(run, *SIZES[1], "run-live-light", "memconsole-light")
    while follower.poll().state in LIVE:
        await asyncio.sleep(0.5)
    for size in SIZES:
        await watching(run, *size, "run-finished")


STORIES = {"planning": planning, "training": training, "out-of-memory": out_of_memory}


async def tell(names: list[str]) -> None:
    for name in names or STORIES:
        await STORIES[name]()


def main() -> None:
    """All stories, or those named on the command line."""
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        for name in ("NO_COLOR", "SSH_CONNECTION"):
            os.environ.pop(name, None)
        asyncio.run(tell(sys.argv[1:]))


if __name__ == "__main__":
    main()
