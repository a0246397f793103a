"""What torch.compile needs on this machine: compilers, and a folder for what they make."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec

from memconsole.user_folders import cache_folder


def missing_compiler(kind: str) -> str:
    """The compiler that torch.compile needs for a `kind` of device and this machine lacks; empty if nothing is missing."""
    if kind in ("gpu", "rocm"):
        return "" if find_spec("triton") else "triton"
    if kind != "cpu":
        return ""
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    found = any(name and shutil.which(name) for name in compilers)
    return "" if found else "a C++ compiler (g++ or clang++)"


def inductor_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that names the folder of torch.compile, in this user's cache. By default it is a fixed name in the
    shared temporary folder, and another user could create it. Raises `NoHomeError`."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder(environment) / "inductor")}
