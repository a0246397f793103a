"""A JAX engine trains, saves and samples a mixture of experts as it does a decoder with one MLP."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole_jax import engine as jax_engine
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch
from memconsole_trainer.randomness import generator
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import jax_comparison, tiny_models
from tests.training.harness.adapted import State

LENGTH, ROWS, STEPS = 24, 4, 20
MODEL = msgspec.structs.replace(
    tiny_models.ARCHITECTURES["qwen3_moe"], layers=2, hidden_size=64, intermediate_size=96
)
"""Large enough for 8-bit state of the experts, and for whole blocks of codes in their rows."""
ADAPTERS = {"optimize.lora_rank": 8, "optimize.freeze_base": True}
HOW: dict[str, dict[str, Any]] = {
    "selective": {"optimize.gradient_checkpointing": "selective"},
    "attention": {"optimize.gradient_checkpointing": "attention"},
    "full, chunked loss": {
        "optimize.gradient_checkpointing": "full",
        "optimize.fused_loss": True,
    },
    "micro-batches": {"optimize.accumulation_steps": 2, "train.batch_size": ROWS // 2},
    "state offloaded": {"optimize.optimizer_offload": "pinned"},
    "activations offloaded, balanced": {
        "optimize.activation_offload": True,
        "optimize.gradient_checkpointing": "full",
        "train.expert_balance": 0.5,
    },
    "adapters, activations offloaded": ADAPTERS
    | {"optimize.activation_offload": True, "optimize.gradient_checkpointing": "full"},
    "codes, selective": ADAPTERS
    | {"optimize.base_storage": "nf4", "optimize.gradient_checkpointing": "selective"},
    "averaged": {"train.ema_decay": 0.9},
}
"""Settings that decide how a step is computed, not what it computes."""
WHAT = (
    "optimize.lora_rank",
    "optimize.freeze_base",
    "optimize.base_storage",
    "train.expert_balance",
)


class Noisy:
    """A model whose every tensor is far from zero."""

    def tensor(self, name: str) -> np.ndarray:
        array = InitialWeights(MODEL, 3).tensor(name)
        noise = generator(9, name).standard_normal(array.shape, dtype=np.float32)
        return array + np.float32(0.1) * noise


def plan_of(**changes: Any) -> Plan:
    settings = {
        "backend": "jax",
        "device.name": "cpu",
        "data.sequence_length": LENGTH,
        "train.batch_size": ROWS,
        "train.learning_rate": 1e-2,
        "train.warmup_steps": 0,
        "train.schedule": "constant",
        "train.sample_tokens": 0,
    }
    return replace(Plan(), settings | changes)


def built(plan: Plan) -> Any:
    engine = jax_engine.create(plan, None)
    engine.build(plan, MODEL, STEPS, Noisy())
    return engine


def batch(plan: Plan, step: int) -> Batch:
    parts = plan.optimize.accumulation_steps
    return tiny_models.batch(parts, plan.train.batch_size, LENGTH, seed=step)


def steps(engine: Any, plan: Plan, count: int = 3) -> list[tuple[float, float]]:
    """Losses and gradient norms."""
    for step in range(count):
        engine.train_step(batch(plan, step))
    return [(m.loss, m.gradient_norm) for m in engine.take_metrics()]


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            c, marks=() if n in ("micro-batches", "codes, selective") else pytest.mark.slow
        )
        for n, c in HOW.items()
    ],
    ids=HOW,
)
def test_how_a_step_is_computed_does_not_change_what_it_learns(changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    plain = plan_of(**{key: value for key, value in changes.items() if key in WHAT})
    found, expected = (steps(built(one), one) for one in (plan, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimize.precision": "bf16"},
        pytest.param({"optimize.precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param({"optimize.precision": "bf16-sr"}, marks=pytest.mark.slow),
        pytest.param({"optimize.optimizer": "adamw-8bit"}, marks=pytest.mark.slow),
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_fewer_bits_learn_nearly_the_same(changes: dict[str, Any]) -> None:
    found, expected = (steps(built(one), one, 6) for one in (plan_of(**changes), plan_of()))
    losses = np.array(found)[:, 0]
    np.testing.assert_allclose(losses, np.array(expected)[:, 0], rtol=0.02)
    assert losses[0] != expected[0][0] or "optimize.optimizer" in changes


def test_it_drops_numbers_and_isolates_documents() -> None:
    plan = plan_of(**{"train.dropout": 0.1, "data.isolate_documents": True})
    second = (np.arange(LENGTH) >= LENGTH // 2).astype(np.int32)
    rows = tiny_models.batch(1, ROWS, LENGTH)
    documents = np.broadcast_to(second, rows["inputs"].shape)
    engine = built(plan)
    for _ in range(8):
        engine.train_step(language_batch(rows["inputs"], rows["targets"], documents))
    losses = [m.loss for m in engine.take_metrics()]
    assert losses[-1] < losses[0] - 0.5


def test_it_goes_on_exactly_where_it_stopped_and_samples_the_likeliest_tokens() -> None:
    plan = plan_of(**{"optimize.precision": "bf16"})
    engine = built(plan)
    steps(engine, plan)
    state = State(engine)
    expected, end = steps(engine, plan), State(engine).tensors

    other = built(plan)
    other.load_state(state)
    assert steps(other, plan) == expected
    for name, tensor in State(other).tensors.items():
        np.testing.assert_array_equal(tensor, end[name], err_msg=name)

    class Trained:
        def tensor(self, name: str) -> Any:
            return end[f"model.{name}"]

    prompt = [5, 17, 60]
    found = other.generate(prompt, 9)
    logits = jax_comparison.logits(MODEL, Trained(), np.array([prompt + found], np.int32))[0]
    assert found == [int(i) for i in logits[len(prompt) - 1 : -1].argmax(-1)]
