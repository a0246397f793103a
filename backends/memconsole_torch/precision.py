"""Mixed precision: matmuls in bfloat16 by autocast; weights, loss and norm statistics stay fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from memconsole.plan.plan import PlanError, Precision


def forward_context(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The context of a forward pass and its loss; backward and optimizer stay outside.

    A fresh one for each micro-batch, because leaving it frees the 16-bit copies of the weights.
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def check(precision: Precision) -> None:
    """Raise `PlanError` for a precision this backend does not train in."""
    if precision == "fp16":
        raise PlanError(
            'optimize.precision = "fp16": the torch backend trains in fp32 | bf16',
            "optimize.precision",
        )


def line(device: torch.device, precision: Precision) -> str:
    """What `precision` means on this device, for a person."""
    if precision == "fp32":
        tensor_cores = device.type == "cuda" and torch.version.hip is None
        return "Precision: float32" + (" with TF32 matmuls" if tensor_cores else "")
    return f"Mixed precision (bfloat16) enabled - {_bf16_speed(device)}"


def _bf16_speed(device: torch.device) -> str:
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "native on this GPU" if native else "emulated on this GPU: slow"
    if device.type == "cpu":
        missing = _missing_cpu_flag()
        return f"slow on this CPU: no {missing}" if missing else "native on this CPU"
    return "weights and loss stay float32"


def _missing_cpu_flag(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instruction set that would make bf16 matmuls fast and is not there; empty if one is."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return ""
    if "flags" not in words:  # not x86: ARM lists `bf16` under Features
        return "" if "bf16" in words else "bf16"
    return "" if words & {"avx512_bf16", "amx_bf16"} else "avx512_bf16"
