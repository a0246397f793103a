"""Builds the stand-ins for NVIDIA's driver library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "data" / "fake_nvml"


def build(name: str, folder: Path) -> bool:
    """Compile ``NAME.c`` as the ``libnvidia-ml.so.1`` in `folder`; False where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return False
    target = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-o", target, SOURCES / f"{name}.c"]
    subprocess.run(command, check=True, capture_output=True)
    return True
