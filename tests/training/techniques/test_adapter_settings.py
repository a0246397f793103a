"""Alpha and targets of LoRA adapters: both backends train the same, their price is exact, and PEFT's files say them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.sections.optimize import LoraTargets
from memconsole.plan.toggles.optimizations import check_conflicts
from memconsole.plan.training.trained import adapter_scale
from memconsole_trainer.techniques.adapters import Merged, adapters_of
from memconsole_trainer.weights.export_run import _peft_matrices
from tests.training.harness.adapted import MODELS, RANK, Base, State, batch, built, plan_with

SETTINGS = {"optimize.lora_alpha": 3.0, "optimize.lora_targets": "query-value"}


def test_adapters_of_some_matrices_train_the_same_in_both_backends() -> None:
    states, losses = [], []
    for backend in ("torch", "jax"):
        plan = plan_with(backend, SETTINGS)
        engine = built(plan, "gpt2")
        for step in range(2):
            engine.train_step(batch(plan, step))
        losses.append([m.loss for m in engine.take_metrics()])
        states.append(State(engine))
        assert step_of(plan, MODELS["gpt2"], "cpu").trained.elements == engine.trainable_parameters
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    names = {n for n in states[0].names() if n.startswith("model.")}
    assert names == {n for n in states[1].names() if n.startswith("model.")}
    assert {n.split(".")[4] for n in names} == {"query", "value"}
    for name in names:
        assert states[0].tensor(name) == pytest.approx(states[1].tensor(name), abs=2e-4), name


@pytest.mark.parametrize("targets", get_args(LoraTargets))
def test_joined_modules_of_a_peft_file_are_what_merging_adds(targets: LoraTargets) -> None:
    plan = plan_with("torch", {"optimize.lora_alpha": 5.0, "optimize.lora_targets": targets})
    model, base = MODELS["gpt2"], Base("gpt2")
    draw = np.random.default_rng(0)
    own = {p.name: draw.normal(size=p.shape) for p in adapters_of(plan, model)}
    merged = Merged(plan, model, base, own.__getitem__)
    found: Any = SimpleNamespace(architecture=model, trained=own.__getitem__)
    modules = {name: b @ a for name, a, b in _peft_matrices(found, RANK, targets)}
    joined = "transformer.h.1.attn.c_attn" in modules
    assert joined == (targets != "mlp")
    assert ("transformer.h.1.mlp.c_fc" in modules) == (targets in ("all", "mlp"))
    if joined:
        names = [f"layers.1.attention.{part}.weight" for part in ("query", "key", "value")]
        added = np.concatenate([merged.tensor(n) - base.tensor(n) for n in names])
        expected = adapter_scale(plan) * modules["transformer.h.1.attn.c_attn"]
        assert added == pytest.approx(expected, abs=1e-4)


def test_settings_of_adapters_need_adapters() -> None:
    with pytest.raises(
        PlanError, match=r"lora_alpha = 16\.0: there are no adapters; set optimize\.lora_rank"
    ):
        check_conflicts(replace(Plan(), {"optimize.lora_alpha": 16.0}))


def test_alpha_is_twice_the_rank_unless_it_is_set() -> None:
    assert adapter_scale(plan_with("torch")) == 2.0
    assert adapter_scale(plan_with("torch", {"optimize.lora_alpha": 1.0})) == 1 / RANK
