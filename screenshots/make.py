"""``make screenshots``: drive the real console and write its screens as SVG and PNG.

``python screenshots/make.py NAME...`` makes only the scenes and stories named. Runs go to a state folder
of their own, which is removed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile

from scenes import SCENES, draw
from stories import STORIES


async def tell(names: list[str]) -> None:
    """The scenes and stories named, all if none is."""
    for name in names or [*SCENES, *STORIES]:
        await (STORIES[name]() if name in STORIES else draw(name))


def main() -> None:
    """Everything, or what the command line names."""
    names = sys.argv[1:]
    unknown = [name for name in names if name not in SCENES and name not in STORIES]
    if unknown:
        sys.exit(f"no picture {unknown[0]}; there are: {', '.join([*SCENES, *STORIES])}")
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        for name in ("NO_COLOR", "SSH_CONNECTION"):
            os.environ.pop(name, None)
        asyncio.run(tell(names))


if __name__ == "__main__":
    main()
