"""The packages that training needs: which of them are not installed here, and how to install them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from memconsole.extras import to_install
from memconsole.plan.errors import PlanError
from memconsole.plan.sections import Plan

NEEDS = {"torch": ("torch",), "jax": ("jax", "flax", "optax")}
"""The packages of each backend besides `DATA`."""
DATA = ("numpy", "grain", "datasets", "tokenizers", "h5py", "safetensors")
"""The packages that read data and keep weights, whatever the backend."""


def installed(package: str) -> bool:
    """Whether a package can be imported here; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def missing(names: Iterable[str]) -> list[str]:
    """Those packages that are not installed."""
    return [name for name in names if not installed(name)]


def missing_words(backend: str = "") -> str:
    """Which packages of a backend are not installed and what to do, in one sentence; "" if none is missing.

    Without a backend: of those that read data.
    """
    lacking = missing((*NEEDS.get(backend, ()), *DATA))
    if not lacking:
        return ""
    return f"{', '.join(lacking)} not installed: {to_install(backend or 'data')}"


def check_packages(plan: Plan) -> None:
    """Raise `PlanError` if this machine lacks packages to train `plan`. A Slurm job has those of its node."""
    words = "" if plan.launch.on == "slurm" else missing_words(plan.backend)
    if words:
        raise PlanError(f"backend = {plan.backend}: {words}", "backend")
