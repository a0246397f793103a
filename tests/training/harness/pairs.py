"""Plans that together hold every pair of settings of the optimizations."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import numpy as np

from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import BY_KEY, check_trainable, conflict
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch
from tests.training.harness import adapted
from tests.training.harness.adapted import LENGTH, batch

ACCUMULATED = {"optimize.accumulation_steps": 2, "train.batch_size": 2}
ADAPTERS = {"optimize.lora_rank": 64, "optimize.freeze_base": True}
BASE = adapted.BASE | {"train.grad_clip": 0.0}


ROWS: dict[str, list[dict[str, Any]]] = {
    **{
        key: [{key: value} for value in BY_KEY[key].values(Plan())]
        for key in (
            "optimize.precision",
            "optimize.gradient_checkpointing",
            "optimize.optimizer",
            "optimize.fused_loss",
            "optimize.tiled_mlp",
            "optimize.optimizer_offload",
            "optimize.activation_offload",
            "optimize.optimizer_in_backward",
            "optimize.compile",
            "optimize.base_storage",
            "data.isolate_documents",
        )
    },
    "optimize.accumulation_steps": [{}, ACCUMULATED],
    "optimize.lora_rank": [{}, ADAPTERS],
    "train.ema_decay": [{}, {"train.ema_decay": 0.9}],
}
"""The settings of each row, the plain one first."""


Choice = tuple[str, int]


def plan_of(backend: str, choices: dict[str, int]) -> Plan:
    """The plan with so many steps in each row. Raises `PlanError` where it is refused."""
    changes = {k: v for key, place in choices.items() for k, v in ROWS[key][place].items()}
    plan = plans.replace(Plan(), {**BASE, **changes, "backend": backend})
    check_trainable(plan)
    check(plan)
    reason = conflict(plan)
    if reason:
        raise PlanError(reason[1])
    return plan


def refusal(backend: str, choices: dict[str, int]) -> str:
    """Why the plan is refused; empty where it is not."""
    try:
        plan_of(backend, choices)
    except PlanError as error:
        return str(error)
    return ""


@cache
def covering(backend: str) -> tuple[list[dict[str, int]], list[tuple[Choice, ...]]]:
    """Plans that hold every pair of settings which any plan can hold, each the best of some random ones; and the
    pairs that none of them can."""
    rng = random.Random(0)
    settings = [(key, place) for key in ROWS for place in range(len(ROWS[key]))]
    left = {
        frozenset(pair) for pair in itertools.combinations(settings, 2) if pair[0][0] != pair[1][0]
    }
    found: list[dict[str, int]] = []
    refused: list[tuple[Choice, ...]] = []
    while left:
        wanted = sorted(min(left, key=sorted))
        best: dict[str, int] | None = None
        gained = 0
        for _ in range(40):
            choices = {key: rng.randrange(len(steps)) for key, steps in ROWS.items()} | dict(wanted)
            for key in rng.sample(list(ROWS), len(ROWS)):
                if not refusal(backend, choices):
                    break
                if key not in dict(wanted):
                    choices[key] = 0
            else:
                adapted = choices | {"optimize.lora_rank": 1}
                choices = choices if "optimize.lora_rank" in dict(wanted) else adapted
            covers = 0 if refusal(backend, choices) else len(left & pairs_of(choices))
            if covers > gained:
                best, gained = choices, covers
        if best is None:
            left.discard(frozenset(wanted))
            refused.append(tuple(wanted))
            continue
        left -= pairs_of(best)
        found.append(best)
    return found, refused


def pairs_of(choices: dict[str, int]) -> set[frozenset[Choice]]:
    return {frozenset(pair) for pair in itertools.combinations(choices.items(), 2)}


def rows(plan: Plan, step: int) -> Batch:
    """Two documents in each row where a plan isolates them."""
    found = batch(plan, step)
    if not plan.data.isolate_documents:
        return found
    second = (np.arange(LENGTH) >= LENGTH // 2).astype(np.int32)
    return language_batch(
        found["inputs"], found["targets"], np.broadcast_to(second, found["inputs"].shape).copy()
    )
