"""The programs of plans that hold every pair of settings are made for devices that are not here, whose weights have other
types: one half of them for a GPU, the other for a TPU."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.plan import Plan
from memconsole_jax import target
from memconsole_jax.compiled.programs import Programs
from tests.training.harness.adapted import MODELS
from tests.training.harness.pairs import ADAPTERS, BASE, covering, plan_of

FEW = (
    {"optimize.precision": "bf16-sr", "optimize.optimizer": "adamw8-all"},
    ADAPTERS | {"optimize.precision": "bf16", "optimize.base_storage": "nf4"},
)


def lowered(plan: Plan, kind: str, model: str) -> None:
    (device, *_) = jax.devices()
    programs = Programs.of(plan, MODELS[model], kind, device)
    with target.absent(kind):
        programs.lower_train()
        programs.lower_evaluate()


@pytest.mark.parametrize("changes", FEW, ids=str)
def test_rounded_weights_and_a_base_in_codes_are_lowered_for_a_tpu_that_is_not_here(
    changes: dict[str, Any],
) -> None:
    plan = plans.replace(Plan(), BASE | {"backend": "jax"} | changes)
    check(plan)
    lowered(plan, "tpu", "llama")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model"), [("gpu", "gpt2"), ("tpu", "llama")])
def test_plans_are_lowered_for_a_device_that_is_not_here(kind: str, model: str) -> None:
    every = [plan_of("jax", choices) for choices in covering("jax")[0]]
    narrow = [p for p in every if p.optimize.precision == "bf16-sr" or p.optimize.lora_rank]
    assert len(narrow) > 10
    for plan in narrow[kind == "tpu" :: 2]:
        lowered(plan, kind, model)
