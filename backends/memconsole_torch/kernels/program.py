"""Whether Triton's programs run on a device, and how one is launched. torch's wheels for Linux bring Triton."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch


def runs_on(device: torch.device) -> bool:
    """Whether programs run on `device`."""
    return device.type == "cuda" and _installed()


def lines(device: torch.device) -> list[str]:
    """What the log says of the programs: nothing where they are not missing."""
    missing = device.type == "cuda" and not _installed()
    work = "the loss, 8-bit AdamW, stochastic rounding and decoding of a frozen base"
    return [f"Triton is not installed: {work} take more memory and time than estimated"] * missing


def launch(name: str, count: int, *arguments: Any, **constants: Any) -> None:
    """Run `count` instances of a program. Each name in `constants` is compiled in."""
    _program(name)[(count,)](*arguments, **constants)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _program(name: str) -> Any:
    """The program. Triton is imported with it, because the import takes as long as that of torch's compiler."""
    return getattr(importlib.import_module("memconsole_torch.kernels.programs"), name)
