"""``make screenshots``: drive the real console and write its screens as SVG, and as PNG where a page shows one.

``python screenshots/make.py [--into FOLDER] [--more] [NAME...]`` makes only the scenes and stories named. Runs
go to a state folder of their own, which is removed. ``--more`` also writes the PNGs that no page shows, into the
folder ``more``, which git ignores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from picture import FOLDER, SIZES, name_of, write_png
from scenes import SCENES, draw
from stories import PICTURES, STORIES

MORE = "more"
SHOWN = (
    "plan-toggled-80x24",
    "plan-does-not-fit-80x24",
    "plan-fitted-80x24",
    "plan-fits-light-80x24",
    "run-live-80x24",
    "run-live-160x48",
    "run-finished-80x24",
    "run-ranks-80x24",
    "run-hybrid-160x48",
    "run-out-of-memory-80x24",
    "run-lqr-160x48",
    "run-efficientids-160x48",
    "remedies-80x24",
    "compare-runs-80x24",
    "devices-8-gpus-80x24",
)
"""Pictures that README.md and docs/ show: these are kept as PNG too."""


def drawn_by(name: str) -> tuple[str, ...]:
    """The pictures of one scene or story."""
    return PICTURES[name] if name in STORIES else tuple(name_of(name, size) for size in SIZES)


async def tell(names: list[str], folder: Path) -> None:
    """Write the SVGs of the scenes and stories named."""
    for name in names:
        await (STORIES[name](folder) if name in STORIES else draw(name, folder))


def write_pngs(names: list[str], folder: Path, more: bool) -> None:
    """Write the PNGs of the scenes and stories named; with `more`, those that no page shows too."""
    for picture in (picture for name in names for picture in drawn_by(name)):
        if picture in SHOWN:
            write_png(folder / f"{picture}.svg", folder / f"{picture}.png")
        elif more:
            (folder / MORE).mkdir(exist_ok=True)
            write_png(folder / f"{picture}.svg", folder / MORE / f"{picture}.png")


def main() -> None:
    """Everything, or what the command line names."""
    every = [*SCENES, *STORIES]
    parser = argparse.ArgumentParser(description="Draw the console's screens.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--more", action="store_true", help="PNGs that no page shows, too")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in every:
            parser.error(f"no picture {name}; there are {', '.join(every)}")
    names = chosen.names or every
    chosen.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        for variable in ("NO_COLOR", "SSH_CONNECTION"):
            os.environ.pop(variable, None)
        asyncio.run(tell(names, chosen.into))
    write_pngs(names, chosen.into, chosen.more)


if __name__ == "__main__":
    main()
