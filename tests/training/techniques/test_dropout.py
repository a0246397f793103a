"""Dropout: masks of a key, the same in a recomputed block and a resumed run; none where nothing is trained."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import torch

from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.optimizations import check_conflicts
from memconsole_jax.models import attention
from memconsole_jax.models import dropout as jax_dropout
from memconsole_torch.models.capped_attention import _dropout_mask, capped_attention
from memconsole_torch.techniques.activations.dropout import dropped, kept
from memconsole_trainer.techniques.dropout import key_of
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.training.engine import test_recommender as recommendation
from tests.training.engine import test_regressor as regression
from tests.training.harness.adapted import State, batch, built, plan_with
from tests.training.memory.test_memory_against_trace import sample

WHOLE = {"optimize.lora_rank": 0, "optimize.freeze_base": False}
ALL: dict[str, Any] = {
    "train.dropout": 0.2,
    "train.attention_dropout": 0.1,
    "optimize.lora_dropout": 0.3,
    "train.seed": 5,
}


def losses(engine: Any, plan: Plan, first: int, last: int) -> list[float]:
    for step in range(first, last):
        engine.train_step(batch(plan, step))
    return [m.loss for m in engine.take_metrics()]


def test_a_mask_drops_its_share_and_the_gradient_the_same_numbers() -> None:
    x = torch.ones(64, 512, requires_grad=True)
    y = dropped(x, key_of(1, 2), 0.25)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert sorted(y.detach().unique().tolist()) == pytest.approx([0.0, 4 / 3])
    assert float(y.detach().mean()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(dropped(x, key_of(1, 2), 0.25), y)
    assert not torch.equal(dropped(x, key_of(1, 3), 0.25), y)
    bits = jnp.array([3, 4], jnp.uint32)
    ones = jnp.ones((64, 512))
    found, pull = jax.vjp(lambda x: jax_dropout.dropped(x, bits, 0.25), ones)
    assert float(found.mean()) == pytest.approx(1.0, abs=0.02)
    assert np.array_equal(pull(ones)[0], found)


def test_attention_drops_shares_after_their_softmax() -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 8, generator=draw, requires_grad=True)
    k, v = (torch.randn(2, 2, 9, 8, generator=draw, requires_grad=True) for _ in range(2))
    found = capped_attention(q, k, v, None, 0.3, 0.0, 77, 0.4)
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    scores = (q @ wide[0].mT * 0.3).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    mask = _dropout_mask(torch.empty(4, 18, 9), 77, 0, 0.4).view(2, 4, 9, 9)
    expected = (scores.softmax(-1) * mask / 0.6) @ wide[1]
    assert torch.allclose(found, expected, atol=1e-6)
    slope = torch.randn(found.shape, generator=draw)
    for ours, theirs in zip(
        *(torch.autograd.grad(y, (q, k, v), slope) for y in (found, expected)), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_dropping_loads_no_compiler() -> None:
    """Its modules take about 75 MiB, which no estimate counts."""
    code = (
        "import sys, torch\n"
        "from memconsole_torch.models.capped_attention import capped_attention\n"
        "from memconsole_torch.techniques.activations.dropout import dropped\n"
        "x = torch.ones(1, 1, 4, 4, requires_grad=True)\n"
        "y = capped_attention(dropped(x, 1, 0.5), x, x, None, 1.0, 9.0)\n"
        "y.sum().backward()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_block_has_the_masks_of_its_forward_pass(mode: str) -> None:
    whole = WHOLE | ALL | {"optimize.lora_dropout": 0.0}
    for changes, kind in ((whole, "gpt2"), (whole, "gpt_neox"), (ALL, "llama")):
        plain = plan_with("torch", changes)
        again = replace(plain, {"optimize.gradient_checkpointing": mode})
        assert losses(built(plain, kind), plain, 0, 3) == losses(built(again, kind), again, 0, 3)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_resumed_run_has_the_same_masks_and_an_evaluation_none(backend: str, kind: str) -> None:
    plan = plan_with(backend, ALL | {"optimize.accumulation_steps": 2, "train.batch_size": 2})
    engine = built(plan, kind)
    losses(engine, plan, 0, 1)
    state = State(engine)
    evaluated = engine.evaluate([batch(plan, 3)]).loss
    assert engine.evaluate([batch(plan, 3)]).loss == evaluated
    onwards = losses(engine, plan, 1, 3)
    engine.load_state(state)
    assert losses(engine, plan, 1, 3) == onwards
    engine.load_state(state)
    assert engine.evaluate([batch(plan, 3)]).loss == evaluated
    if backend == "torch":
        without = replace(plan, dict.fromkeys(ALL, 0.0) | {"train.seed": 5})
        other = built(without, kind)
        other.load_state(state)
        assert other.evaluate([batch(plan, 3)]).loss == evaluated
        assert losses(other, without, 1, 3) != onwards


@pytest.mark.parametrize("task", [regression, recommendation], ids=("regressor", "recommender"))
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_other_models_drop_the_same_where_they_are_resumed_or_recomputed(
    backend: str, task: Any
) -> None:
    own = {"train__dropout": 0.3, "optimize__accumulation_steps": 2}

    def trained(engine: Any, first: int) -> list[float]:
        for step in range(first, 3):
            engine.train_step(task.batch(2, seed=step))
        return [m.loss for m in engine.take_metrics()]

    engine = task.built(backend, **own)
    engine.train_step(task.batch(2, seed=0))
    engine.take_metrics()
    state = regression.State(engine)
    evaluated = engine.evaluate([task.batch(2, seed=1)]).mean
    onwards = trained(engine, 1)
    assert onwards[0] != pytest.approx(evaluated, rel=1e-3), (
        "training drops, an evaluation does not"
    )
    engine.load_state(state)
    assert engine.evaluate([task.batch(2, seed=1)]).mean == evaluated
    assert trained(engine, 1) == onwards
    plain = task.built(backend, **own | {"train__dropout": 0.0})
    plain.load_state(state)
    assert trained(plain, 1) != pytest.approx(onwards, rel=1e-3)
    again = task.built(backend, optimize__gradient_checkpointing="full", **own)
    again.load_state(state)
    assert trained(again, 1) == pytest.approx(onwards, rel=1e-6)


def test_places_and_micro_batches_have_masks_of_their_own() -> None:
    keys = {
        key_of(0, step, micro, place) for step in (0, 1) for micro in (0, 1) for place in (0, 1)
    }
    assert len(keys) == 8
    x = torch.empty(8, 8)
    assert not torch.equal(kept(x, key_of(0, 0, 0, 0), 0.5), kept(x, key_of(0, 0, 0, 1), 0.5))


def test_jax_draws_other_masks_for_each_part_of_the_batch_and_chunk_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "CPU_ROWS_BYTES", 0)
    monkeypatch.setattr(attention, "CPU_QUERIES", 64)
    assert attention.chunk_sizes(2, 1, 128) == (1, 64)
    ones = jnp.ones((2, 128, 1, 4))
    bits = jnp.array([1, 2], jnp.uint32)
    found = attention.causal_attention(ones, ones, ones, 1.0, None, drop=(bits, 0.5))
    kept = np.asarray(found)[..., 0]
    np.testing.assert_allclose(kept[:, 64:].mean(1), 1, atol=0.1)
    assert not np.array_equal(kept[0], kept[1])
    assert not np.array_equal(kept[0, :64] > 1, kept[0, 64:] > 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimize.compile": True, "train.dropout": 0.1}, r"set train\.dropout = 0"),
        ({"optimize.lora_dropout": 0.1}, "there are no adapters"),
    ],
)
def test_options_that_exclude_dropout_say_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_conflicts(replace(Plan(), changes))


@pytest.mark.parametrize("preset", ["lqr", "efficientids"])
def test_other_tasks_have_dropout_but_none_of_attention(preset: str) -> None:
    check(replace(catalog.preset(preset), {"train.dropout": 0.1}))
    message = r"train\.attention_dropout = 0\.1: is for language models; "
    with pytest.raises(PlanError, match=message + preset):
        check(replace(catalog.preset(preset), {"train.attention_dropout": 0.1}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rates", [{"train.dropout": 0.1}, {"train.attention_dropout": 0.1}], ids=str
)
def test_masks_are_priced_as_they_are_traced(rates: dict[str, float]) -> None:
    (case,) = sample(1, gradient_checkpointing="none", precision="bf16", kind="gpu")
    case = msgspec.structs.replace(case, plan=replace(case.plan, rates))
    expected, found = estimated(case), traced(case)
    for phase in TRAINING:
        assert 0.999 < expected[phase] / found[phase] < 1.25, phase
    peak, truth = (max(peaks[phase] for phase in TRAINING) for peaks in (expected, found))
    assert peak == pytest.approx(truth, rel=0.06)
