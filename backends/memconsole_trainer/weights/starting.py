"""Finds the directory with the weights of a plan's model."""

from __future__ import annotations

from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.plan import Plan


def weights_directory(plan: Plan) -> Path | None:
    """The directory of the plan's model, if it has one."""
    found = catalog.model_directory(plan)
    return Path(found) if found else None
