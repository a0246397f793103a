"""The compilers that torch.compile needs on this machine."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec


def missing_compiler(kind: str) -> str:
    """The compiler that torch.compile needs for a `kind` of device and this machine lacks; empty if nothing is missing."""
    if kind in ("gpu", "rocm"):
        return "" if find_spec("triton") else "triton"
    if kind != "cpu":
        return ""
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    has_compiler = any(name and shutil.which(name) for name in compilers)
    return "" if has_compiler else "a C++ compiler (g++ or clang++)"
