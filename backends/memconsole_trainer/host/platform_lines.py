"""First lines of a run's log: the processor and the optimizations that are on."""

from __future__ import annotations

import platform
from pathlib import Path

from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS


def cpu_name() -> str:
    """The processor's model name, or its architecture if the name is unknown."""
    try:
        for text in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, value = text.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def optimization_lines(plan: Plan, kind: str) -> list[str]:
    """One line for each optimization of `plan` that is on, for a `kind` of device. The backend adds
    the lines of precision and compilation."""
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
