"""``make screenshots``: drive the real console and write its screens as SVG and PNG.

``python screenshots/make.py [--into FOLDER] [NAME...]`` makes only the scenes and stories named. Runs go
to a state folder of their own, which is removed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

from picture import FOLDER
from scenes import SCENES, draw
from stories import STORIES


async def tell(names: list[str], folder: Path) -> None:
    """The scenes and stories named, all if none is."""
    for name in names or [*SCENES, *STORIES]:
        await (STORIES[name](folder) if name in STORIES else draw(name, folder))


def main() -> None:
    """Everything, or what the command line names."""
    parser = argparse.ArgumentParser(description="Draw the console's screens.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*SCENES, *STORIES]))
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in SCENES and name not in STORIES:
            parser.error(f"no picture {name}; there are {', '.join([*SCENES, *STORIES])}")
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        for variable in ("NO_COLOR", "SSH_CONNECTION"):
            os.environ.pop(variable, None)
        asyncio.run(tell(chosen.names, chosen.into))


if __name__ == "__main__":
    main()
