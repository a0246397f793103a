"""torch.compile, applied around the blocks of a plain module."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from memconsole.plan.machine.compilers import missing_compiler
from memconsole.plan.plan import PlanError


def check(device: torch.device) -> None:
    """Raise `PlanError` if torch.compile cannot work here; the message says what is missing."""
    missing = missing_compiler("gpu" if device.type == "cuda" else device.type)
    if missing:
        raise PlanError(
            f"optimize.compile = true: torch.compile needs {missing}, which is not installed here",
            "optimize.compile",
        )


def apply(module: nn.Module) -> None:
    """Compile each block. Blocks share one compiled graph, so the cost does not grow with depth.

    Apply after checkpointing, so that a checkpointed block is compiled together with its
    recomputation.
    """
    for block in module.layers:
        block.compile()


def paused() -> AbstractContextManager[object]:
    """A context in which blocks run uncompiled, for shapes that never repeat. Without the compiler
    nothing is compiled."""
    imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if imported else nullcontext()
