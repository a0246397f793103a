"""How many devices one machine has."""

from __future__ import annotations

from collections.abc import Collection

from memconsole.plan.plan import Plan, PlanError

MOST_GPUS = 8
_SIXTEEN = frozenset({"v100-32gb", "a100-40gb"})
"""GPUs that some machines have 16 of."""


def gpu_counts(device: str) -> tuple[int, ...]:
    """How many GPUs of the catalog's `device` machines have."""
    return (*range(1, MOST_GPUS + 1), *((16,) if device in _SIXTEEN else ()))


def check_count(plan: Plan, counts: Collection[int]) -> None:
    """Raise `PlanError` unless one machine has as many devices as the plan wants."""
    name, count = plan.device.name, plan.device.count
    if count not in counts:
        *fewer, most = map(str, counts)
        words = f"{', '.join(fewer)} or {most}" if fewer else most
        raise PlanError(
            f"device.count = {count}: a machine with {name} has {words} of them",
            "device.count",
        )
