"""What a run's log says first of the machine's processor and of the optimizations that are on, for a person."""

from __future__ import annotations

import platform
from pathlib import Path

from memconsole.plan.optimizations import OPTIMIZATIONS
from memconsole.plan.plan import Plan


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name, or at least its kind."""
    try:
        for text in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = text.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def optimization_lines(plan: Plan, kind: str) -> list[str]:
    """Which optimizations of `plan` are on, on a `kind` of device, a line each; precision and compiling are the
    backend's to tell."""
    t = plan.train
    said = (row.says(plan, kind) for row in OPTIMIZATIONS if row.says)
    lines = [line for line in said if line]
    if t.deterministic:
        lines.append(
            "Deterministic: the same bits from the same seed; on a GPU some kernels are slower"
        )
    if t.ema_decay:
        lines.append(
            f"Average of the trained weights (EMA, decay {t.ema_decay:g}): evaluated, sampled and exported in their place"
        )
    return lines
