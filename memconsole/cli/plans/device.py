"""The device that a plan is priced against, as `plan` and `fit` tell it."""

from __future__ import annotations

from typing import Any

from memconsole.plan.machine.budget import Budget
from memconsole.units import format_bytes


def device_document(budget: Budget) -> dict[str, Any]:
    return {
        "name": budget.name,
        "kind": budget.kind,
        "memory": budget.memory_label,
        "total_bytes": budget.total_bytes,
        "usable_bytes": budget.usable_bytes,
        "usable_because": budget.why,
    }


def device_words(budget: Budget) -> str:
    """``h100-80gb (70 GiB of 80 GiB HBM usable: catalog)``."""
    return (
        f"{budget.name} ({format_bytes(budget.usable_bytes)} of {format_bytes(budget.total_bytes)} "
        f"{budget.memory_label} usable: {budget.why})"
    )
