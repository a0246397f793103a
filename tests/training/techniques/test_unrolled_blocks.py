"""JAX blocks that are compiled each by itself train as those in a loop do. CPUs refuse them, so the engines are made
without the check."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_jax import devices, target
from memconsole_jax import engine as jax_engine
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.engine import JaxEngine
from memconsole_jax.tasks.language import LANGUAGE
from tests.training.harness import adapted
from tests.training.harness.adapted import BASE, MODELS, batch
from tests.training.harness.pairs import ACCUMULATED, ADAPTERS

COMPILED = {"optimize.compile": True}
FULL = {"optimize.gradient_checkpointing": "full"}
STEPS = 3


def plan_with(changes: dict[str, Any]) -> Plan:
    plan = plans.replace(Plan(), BASE | {"backend": "jax"} | changes)
    check(plan)
    return plan


def losses(plan: Plan, model: str) -> list[float]:
    engine = JaxEngine(plan, devices.find_all(plan, 1))
    engine.build(plan, MODELS[model], STEPS, adapted.Base(model))
    for step in range(STEPS):
        engine.train_step(batch(plan, step))
    return [m.loss for m in engine.take_metrics()]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt2", ACCUMULATED | FULL),
        pytest.param(
            "llama", ACCUMULATED | ADAPTERS | {"optimize.lora_dropout": 0.1}, marks=pytest.mark.slow
        ),
        ("llama", {"optimize.gradient_checkpointing": "selective", "train.dropout": 0.1}),
    ],
    ids=str,
)
def test_blocks_without_a_loop_train_the_same(model: str, changes: dict[str, Any]) -> None:
    expected, found = (losses(plan_with(changes | more), model) for more in ({}, COMPILED))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def lowered(changes: dict[str, Any]) -> tuple[str, str]:
    """The training step and the evaluation as a GPU would get them."""
    plan = plan_with({"device.name": "h100-80gb"} | changes)
    programs = Programs.of(plan, MODELS["gpt2"], "gpu", jax.devices()[0])
    with target.absent("gpu"):
        return programs.lower_train().as_text(), programs.lower_evaluate().as_text()


def test_only_the_training_step_loses_its_loops() -> None:
    loop, looping = lowered({})
    step, evaluation = lowered(COMPILED)
    within_a_block = (
        loop.count("stablehlo.while") - 2
    )  # without those over blocks: forward, backward
    # JAX 0.10 lowers the calls of one block to a shared function; later versions repeat its body for each call.
    allowed = (within_a_block, MODELS["gpt2"].layers * within_a_block)
    assert step.count("stablehlo.while") in allowed
    assert evaluation == looping


@pytest.mark.parametrize("mode", ["full", "attention", "selective"])
def test_recomputed_blocks_have_barriers_only_without_a_loop(
    mode: str,
) -> None:
    """Without barriers, XLA would compute them once and keep everything."""

    def kept_apart(changes: dict[str, Any]) -> bool:
        plan, a = plan_with({"optimize.gradient_checkpointing": mode} | changes), MODELS["gpt2"]
        programs = Programs.of(plan, a, "cpu", jax.devices()[0])
        gradients = jax.grad(LANGUAGE.loss(plan, a))
        made = jax.make_jaxpr(gradients)(programs.trained_shapes, {}, programs.arrays(1))
        return "prevent_cse=True" in str(made)

    assert not kept_apart({})
    assert kept_apart(COMPILED)


def test_a_cpu_refuses_blocks_without_a_loop_also_where_the_plan_names_no_device() -> None:
    plan = plan_with(COMPILED | {"device.name": "auto"})
    check_trainable(plan, "gpu")
    with pytest.raises(PlanError, match="blocks in a loop"):
        check_trainable(plan, "cpu")
    with pytest.raises(PlanError, match="blocks in a loop"):
        jax_engine.create(plan, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (FULL | {"optimize.activation_offload": True}, "in the loop over blocks"),
        ({"optimize.sharding": "fsdp", "device.count": 2}, "several blocks"),
    ],
)
def test_what_needs_the_loop_is_refused_without_it(changes: dict[str, Any], reason: str) -> None:
    gpu = {"device.name": "h100-80gb"}
    plan_with(gpu | changes)
    with pytest.raises(PlanError, match=reason):
        plan_with(gpu | changes | COMPILED)
