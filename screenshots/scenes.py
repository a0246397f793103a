"""Pictures that are the same on every machine: plans for catalog cards, and a recorded reading of eight GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picture import SIZES, name_of, settle, shoot

from memconsole import typed_json
from memconsole.devices.reading import Devices
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.plan.plan import Plan, apply_settings
from memconsole.tui.app.console import ConsoleApp

READING = Path(__file__).parents[1] / "tests" / "data" / "eight_gpus.json"
# The catalog knows the size of this dataset. That of the default one depends on the Python that is installed.
DATA = "data.source=wikitext-2"
CARD = (
    DATA,
    "model.name=gpt2",
    "data.sequence_length=512",
    "train.batch_size=8",
    "device.name=rtx-4090",
)
TOO_LARGE = (
    DATA,
    "model.name=llama-3.2-1b",
    "data.sequence_length=1024",
    "device.name=rtx-3060-12gb",
)


@dataclass(frozen=True)
class Scene:
    """A console on a plan, taken to a screen by keys."""

    settings: tuple[str, ...] = CARD
    keys: tuple[str, ...] = ()
    theme: str | None = None
    ascii_only: bool = False


SCENES = {
    "plan-fits": Scene(),
    "plan-fits-light": Scene(theme="memconsole-light"),
    "plan-fits-ascii": Scene(theme="ansi-dark", ascii_only=True),
    "plan-toggled": Scene(keys=("2", "2", "5")),
    "plan-hybrid": Scene(keys=("H",)),
    "plan-does-not-fit": Scene(TOO_LARGE),
    "plan-fitted": Scene(TOO_LARGE, keys=("f",)),
    "compare-plans": Scene(keys=("2", "2", "5", "C", "down", "enter")),
    "devices-8-gpus": Scene(keys=("g",)),
    "help": Scene(keys=("question_mark",)),
}


class RecordedConsole(ConsoleApp):
    """The console over recorded devices, and without a tracer."""

    def _start_probe(self) -> None:
        self.set_devices(typed_json.decode(READING.read_bytes(), Devices))

    def open_book(self) -> ExactBook | None:
        return None


def console(scene: Scene) -> RecordedConsole:
    """The console before its keys."""
    plan = apply_settings(Plan(), scene.settings)
    return RecordedConsole(plan, ascii=scene.ascii_only, slow_link=False)


async def play(scene: Scene, app: ConsoleApp, pilot: Any) -> None:
    """Take a running console to the scene."""
    if scene.theme is not None:
        app.theme = scene.theme
    await settle(app, pilot)
    for key in scene.keys:
        await pilot.press(key)
        await settle(app, pilot)


async def draw(name: str, folder: Path) -> None:
    """Write the scene's pictures."""
    scene = SCENES[name]
    for size in SIZES:
        app = console(scene)
        async with app.run_test(size=size) as pilot:
            await play(scene, app, pilot)
            await shoot(app, pilot, folder / name_of(name, size))
