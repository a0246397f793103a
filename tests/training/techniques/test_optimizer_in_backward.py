"""Updates inside the backward pass: the same weights bit for bit, and gradients that are never all alive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from memconsole.memory.activations.torch_step import moments
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import BY_KEY, with_value
from memconsole_torch import engine as torch_engine
from memconsole_torch.tracing.trace_liveness import Liveness
from memconsole_trainer.weights.initialize import InitialWeights
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted, offloaded, tiny_models
from tests.training.harness.adapted import LENGTH, batch, built
from tests.training.harness.grids import spread

torch.set_num_threads(1)
KEY = "optimize.optimizer_in_backward"
STEPS = 6
OPTIMIZERS = (
    "adamw",
    "adamw-8bit",
    "adamw8-all",
    "adafactor",
    "apollo-mini",
    "lion",
    "muon",
    "sgd",
)


def plan_with(changes: dict[str, Any]) -> Plan:
    return offloaded.plan_with("torch", {"train.grad_clip": 0.0} | changes)


def stepped(changes: dict[str, Any]) -> tuple[Any, list[Any]]:
    plan = plan_with(changes)
    engine = built(plan)
    for step in range(STEPS):
        engine.train_step(batch(plan, step))
    return engine, engine.take_metrics()


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [*((o, "fp32") for o in OPTIMIZERS), ("adamw", "bf16-sr"), ("adamw-8bit", "bf16-sr")],
)
def test_weights_state_and_norms_are_those_of_the_plain_step(
    optimizer: str, precision: str
) -> None:
    changes = {"optimize.optimizer": optimizer, "optimize.precision": precision}
    plain, expected = stepped(changes)
    engine, found = stepped({**changes, KEY: True})
    state = adapted.State(plain)
    assert set(adapted.State(engine).names()) == set(state.names())
    for name, array in adapted.State(engine).tensors.items():
        np.testing.assert_array_equal(array, state.tensor(name), name)
    assert [m.loss for m in found] == [m.loss for m in expected]
    norms = [[m.gradient_norm for m in metrics] for metrics in (found, expected)]
    np.testing.assert_allclose(*norms, rtol=1e-6)
    assert found[-1].loss < found[0].loss
    assert all(p.grad is None for p in engine.module.parameters())


def test_it_composes_with_everything_that_is_not_refused() -> None:
    changes = {
        "optimize.precision": "bf16",
        "optimize.gradient_checkpointing": "full",
        "optimize.fused_loss": True,
        "optimize.optimizer": "adamw-8bit",
    }
    lora = {"optimize.lora_rank": 4, "optimize.freeze_base": True, "optimize.base_storage": "nf4"}
    for more in ({}, lora):
        plain, expected = stepped(changes | more)
        engine, found = stepped(changes | more | {KEY: True})
        assert [m.loss for m in found] == [m.loss for m in expected]
        before = adapted.State(engine)
        plain.load_state(before)
        engine.load_state(before)
        for each in (plain, engine):
            each.train_step(batch(plan_with(changes | more), 3))
        assert plain.take_metrics()[-1].loss == engine.take_metrics()[-1].loss


def test_gradients_are_never_all_alive() -> None:
    """Live bytes of a real step above what is there before it, with and without, next to the estimate."""
    a = Architecture(
        family="llama", vocab_size=96, hidden_size=128, layers=6, heads=4, kv_heads=4, head_size=32,
        intermediate_size=256, max_positions=64,
    )  # fmt: skip
    peaks, priced = [], []
    for inside in (False, True):
        plan = plan_with({KEY: inside, "train.batch_size": 1})
        engine = torch_engine.create(plan, None)
        engine.build(plan, a, STEPS, InitialWeights(a, 1))
        tracker = Liveness()
        with tracker:
            for _, tensor in engine.saved.named():
                tracker.count(tensor)
            tracker.phase, held = "step", tracker.live
            engine.train_step(tiny_models.batch(1, 1, LENGTH))
            peaks.append(tracker.peaks["step"] - held)
        step = step_of(plan, a, "cpu")
        most = max(m.total for m in moments(step) if m.phase in TRAINING)
        priced.append(most - step.weights - step.state.resident)
    gradients = 4 * sum(p.size for p in parameters(a))
    assert peaks[0] - peaks[1] > 0.7 * gradients
    np.testing.assert_allclose(peaks, priced, rtol=0.05)


@pytest.mark.parametrize(
    ("precision", "optimizer", "kind"), spread(["fp32", "bf16"], ["adamw", "muon"], ["cpu", "gpu"])
)
def test_every_phase_is_priced_as_it_is_traced(precision: str, optimizer: str, kind: str) -> None:
    a = Architecture(
        family="llama", vocab_size=2000, hidden_size=256, layers=2, heads=4, kv_heads=2, head_size=64,
        intermediate_size=760, max_positions=512, tied_embeddings=precision == "bf16",
    )  # fmt: skip
    changes = {"optimize.precision": precision, "optimize.optimizer": optimizer}
    found, plain = ({}, {})
    for inside, peaks in ((True, found), (False, plain)):
        case = Case(a, plan_with({**changes, KEY: inside}), kind)
        expected = estimated(case)
        peaks.update(traced(case))
        for phase in TRAINING:
            assert expected[phase] == pytest.approx(peaks[phase], rel=0.03), (phase, inside)
    assert max(found[p] for p in TRAINING) < max(plain[p] for p in TRAINING)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimize.accumulation_steps": 2}, "gradients are added up"),
        ({"train.grad_clip": 1.0}, "the norm of all gradients"),
        ({"optimize.precision": "fp16"}, "fp16 skips a step"),
    ],
)
def test_what_needs_every_gradient_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    plan = plans.replace(Plan(), {"train.grad_clip": 0.0, KEY: True, **changes})
    with pytest.raises(PlanError, match=reason) as error:
        check(plan)
    assert error.value.key == KEY
    with pytest.raises(PlanError, match=reason):
        with_value(BY_KEY[KEY], plans.replace(plan, {KEY: False}), True)


def test_jax_says_why_it_has_no_such_toggle() -> None:
    plan = plans.replace(Plan(), {"backend": "jax"})
    assert "one program without hooks" in (BY_KEY[KEY].refusal(plan, True) or "")
