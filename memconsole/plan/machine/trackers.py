"""Experiment trackers that a run's figures are sent to: which a plan asks for, and what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from memconsole.extras import to_install
from memconsole.plan.errors import PlanError
from memconsole.plan.machine.packages import installed
from memconsole.plan.sections import Plan

Kind = Literal["wandb", "mlflow"]
KINDS: tuple[Kind, ...] = ("wandb", "mlflow")
NAMES: dict[Kind, str] = {"wandb": "W&B", "mlflow": "MLflow"}


def wanted(plan: Plan) -> tuple[Kind, ...]:
    """The trackers of a plan."""
    asked = {"wandb": plan.train.wandb != "none", "mlflow": plan.train.mlflow}
    return tuple(kind for kind in KINDS if asked[kind])


def check_trackers(plan: Plan, is_installed: Callable[[str], bool] = installed) -> None:
    """Raise `PlanError` if the package of a tracker is missing."""
    for kind in wanted(plan):
        if not is_installed(kind):
            value = plan.train.wandb if kind == "wandb" else "true"
            raise PlanError(
                f"train.{kind} = {value}: the package {kind} is not installed here; "
                f"{to_install(kind)}",
                f"train.{kind}",
            )
