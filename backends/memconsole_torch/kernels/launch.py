"""Launches Triton kernels where they run."""

from __future__ import annotations

import importlib
import importlib.util
import os
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from memconsole.user_folders import NoHomeError, cache_folder

OLDEST = 7, 0
"""The lowest compute capability of an NVIDIA GPU that Triton compiles for (torch, `GPUTooOldForTriton`)."""


def runs_on(device: torch.device) -> bool:
    """Whether kernels run on `device`."""
    return device.type == "cuda" and not _missing(device)


def lines(device: torch.device) -> list[str]:
    """What the log says of the kernels: nothing where they run, or where the device needs none."""
    if device.type != "cuda" or not (missing := _missing(device)):
        return []
    work = "the loss, 8-bit AdamW, stochastic rounding and decoding of a frozen base"
    return [f"{missing}: {work} take more memory and time than estimated"]


def run(name: str, count: int, *arguments: Any, **constants: Any) -> None:
    """Run `count` instances of a kernel. Each name in `constants` is compiled in."""
    _kernel(name)[(count,)](*arguments, **constants)


@cache
def _missing(device: torch.device) -> str:
    """Why kernels do not run on a GPU; empty if they do."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST:
        return "Triton does not compile for a GPU as old as this"
    return ""


@cache
def _kernel(name: str) -> Any:
    """The kernel. Triton is imported with it, because the import takes as long as that of torch's compiler. It keeps what
    it compiles in the home folder, which a container may lack, so that it is given our own folder."""
    if "TRITON_HOME" not in os.environ:
        with suppress(NoHomeError):
            os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
    return getattr(importlib.import_module("memconsole_torch.kernels.triton_kernels"), name)
