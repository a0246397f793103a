"""The programs of plans that hold every pair of settings are made for devices that are not here, whose weights have other
types: one half of them for a GPU, the other for a TPU."""

from __future__ import annotations

import jax
import pytest

from memconsole_jax import target
from memconsole_jax.programs import Programs
from tests.training.harness.adapted import MODELS
from tests.training.harness.pairs import covering, plan_of


@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "model"), [("gpu", "gpt2"), ("tpu", "llama")])
def test_plans_are_lowered_for_a_device_that_is_not_here(
    kind: str, model: str, most: int | None
) -> None:
    (device, *_) = jax.devices()
    plans = [plan_of("jax", choices) for choices in covering("jax")[0]]
    narrow = [p for p in plans if p.optimize.precision == "bf16-sr" or p.optimize.lora_rank]
    assert len(narrow) > 10
    for plan in narrow[kind == "tpu" :: 2][:most]:
        programs = Programs.of(plan, MODELS[model], kind, device)
        with target.absent(kind):
            programs.lower_train()
            programs.lower_evaluate()
