"""How many devices one machine has."""

from __future__ import annotations

from collections.abc import Collection

from memconsole.plan.plan import Plan, PlanError

MOST_GPUS = 8
_SIXTEEN = frozenset({"v100-32gb", "a100-40gb"})
"""GPUs that some machines have 16 of."""
TPU_COUNTS = {
    "tpu-v2": (8,),
    "tpu-v3": (8,),
    "tpu-v4": (4,),
    "tpu-v5e": (1, 4, 8),
    "tpu-v5p": (1, 2, 4),
    "tpu-v6e": (1, 4, 8),
    "tpu-7x": (2, 8),
}
"""How many of the catalog's TPUs nodes of Kubernetes have."""
CORES = frozenset({"tpu-v2", "tpu-v3", "tpu-7x"})
"""TPUs of the catalog that are one of a chip's two cores. Kubernetes counts chips."""


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
