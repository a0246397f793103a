"""Finds the jemalloc library of this machine, which a CPU run's heap may use."""

from __future__ import annotations

import platform
import sys
from functools import lru_cache
from pathlib import Path

FILE = "libjemalloc.so.2"


@lru_cache(maxsize=4)
def library(root: Path = Path("/"), prefix: Path = Path(sys.prefix)) -> str:
    """The path of jemalloc's shared library: of the Python environment, else of the system. Empty
    if there is none."""
    machine = platform.machine()
    folders = (
        prefix / "lib",
        root / "usr/local/lib",
        root / f"usr/lib/{machine}-linux-gnu",
        root / "usr/lib64",
        root / "usr/lib",
    )
    return next((str(folder / FILE) for folder in folders if (folder / FILE).is_file()), "")
