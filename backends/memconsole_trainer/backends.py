"""Finds an installed backend by its name."""

from __future__ import annotations

from importlib.metadata import entry_points

from memconsole.plan.plan import PlanError
from memconsole_trainer.engine import EngineFactory


def engine_factory(backend: str) -> EngineFactory:
    """Return the backend called `backend`. Raises `PlanError` when it cannot be imported."""
    found = [e for e in entry_points(group="memconsole.backends") if e.name == backend]
    if not found:
        raise PlanError(f'backend = "{backend}": not installed', "backend")
    try:
        factory: EngineFactory = found[0].load()
    except ModuleNotFoundError as error:
        raise PlanError(
            f'backend = "{backend}": {error.name} is not installed; '
            f'install it with pip install "memconsole[{backend}]"',
            "backend",
        ) from error
    return factory
