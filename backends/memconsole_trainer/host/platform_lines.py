"""First lines of a run's log: the optimizations that are on."""

from __future__ import annotations

from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS


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
