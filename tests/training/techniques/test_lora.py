"""LoRA on a frozen base: only adapters train, are saved and cost; merging changes no logit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memconsole.memory.state.step_sizes import step_of
from memconsole.plan import plan as plans
from memconsole.plan.models.architecture import parameters
from memconsole.plan.plan import Plan
from memconsole_torch import engine as torch_engine
from memconsole_torch.models import pretrained
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.randomness import drawn
from memconsole_trainer.techniques import adapters
from memconsole_trainer.weights.initialize import InitialWeights
from memconsole_trainer.weights.trained import TrainedModel
from tests.training.harness import torch_comparison
from tests.training.harness.adapted import (
    COMPOSED,
    LENGTH,
    MODELS,
    RANK,
    Base,
    State,
    batch,
    built,
    plan_with,
    trained,
)
from tests.training.harness.step_memory import step_memory

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    yield
    trained.cache_clear()


@pytest.mark.parametrize("kind", MODELS)
def test_both_backends_take_the_same_twenty_steps(kind: str) -> None:
    ours, theirs = trained("torch", kind)[1], trained("jax", kind)[1]
    assert ours[-1] < ours[0] - 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_it_composes_with_everything_else() -> None:
    ours, theirs = (trained(b, composed=True)[1] for b in ("torch", "jax"))
    plain = trained("torch")[1]
    np.testing.assert_allclose(ours, theirs, rtol=0.01)
    np.testing.assert_allclose(ours, plain, rtol=0.02)


@pytest.mark.parametrize("kind", MODELS)
def test_mixed_precision_trains_adapters_of_every_family(kind: str) -> None:
    """A norm's bias stays in the precision of the norm."""
    losses = []
    for backend in ("torch", "jax"):
        plan = plan_with(backend, {"optimize.precision": "bf16"})
        engine = built(plan, kind)
        for step in range(4):
            engine.train_step(batch(plan, step))
        losses.append([m.loss for m in engine.take_metrics()])
    np.testing.assert_allclose(*losses, rtol=0.01)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_first_loss_is_the_bases(backend: str) -> None:
    architecture, rows = MODELS["llama"], batch(plan_with(backend), 0)
    logits = torch_comparison.logits(architecture, Base("llama"), rows["inputs"][0])
    scores = torch.from_numpy(logits).log_softmax(-1)
    targets = torch.from_numpy(rows["targets"][0]).long()
    kept = targets != -100
    expected = -scores[kept].gather(1, targets[kept][:, None]).mean()
    assert trained(backend)[1][0] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_only_adapters_train_and_only_they_are_saved(backend: str) -> None:
    engine, _ = trained(backend)
    architecture = MODELS["llama"]
    expected = {p.name: p for p in adapters.adapters(architecture, RANK)}
    base = sum(p.size for p in parameters(architecture))
    count = sum(p.size for p in expected.values())
    assert (engine.parameters, engine.trainable_parameters) == (base + count, count)
    saved = State(engine).tensors
    assert {n for n in saved if n.startswith("model.")} == {f"model.{n}" for n in expected}
    moments = sum(
        x.nbytes for n, x in saved.items() if n.startswith("optimizer.") and ".lora_" in n
    )
    assert moments == 8 * count
    for name, p in expected.items():
        assert not np.array_equal(saved[f"model.{name}"], drawn(p, 0)), name


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_estimate_counts_these_weights(backend: str) -> None:
    for composed in (False, True):
        engine, _ = trained(backend, composed=composed)
        plan = plan_with(backend, COMPOSED if composed else None)
        step = step_of(plan, MODELS["llama"], "cpu")
        assert step.trained.elements == engine.trainable_parameters
        if backend == "torch":
            held = sum(p.nbytes for p in engine.module.parameters())
        else:
            held = sum(
                x.nbytes for x in [*engine._frozen.values(), *engine._train_state.weights.values()]
            )
        assert held == step.weights


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("composed", [False, True], ids=["fp32", "bf16"])
def test_merged_weights_give_the_same_logits(backend: str, composed: bool) -> None:
    """Through the loss: an evaluation of merged weights in a plain engine."""
    engine, _ = trained(backend, composed=composed)
    changes = COMPOSED if composed else {}
    plan = plan_with(backend, changes)
    state = State(engine)
    merged = adapters.Merged(
        plan, MODELS["llama"], Base("llama"), lambda name: state.tensor(f"model.{name}")
    )
    rows = batch(plan, 0)["inputs"].reshape(4, LENGTH)
    targets = batch(plan, 0)["targets"].reshape(4, LENGTH)
    logits = torch_comparison.logits(MODELS["llama"], merged, rows)
    scores = torch.from_numpy(logits).log_softmax(-1)
    labels = torch.from_numpy(targets).long()
    kept = labels != -100
    expected = -float(scores[kept].gather(1, labels[kept][:, None]).sum())
    found = engine.evaluate([batch(plan, 0)])
    assert found.loss == pytest.approx(expected, rel=3e-3 if composed else 1e-5)
    base = torch_comparison.logits(MODELS["llama"], Base("llama"), rows)
    assert np.abs(logits - base).max() > 0.1
    if backend == "torch" and not composed:
        with torch.no_grad():
            own = engine.module.logits(torch.from_numpy(rows)).numpy()
        np.testing.assert_allclose(own, logits, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_resumed_run_continues_bit_for_bit_and_only_on_its_base(backend: str) -> None:
    plan = plan_with(backend)
    engine, _ = trained(backend)
    before = State(engine)
    engine.train_step(batch(plan, 5))
    engine.take_metrics()
    after = State(engine)
    engine.load_state(before)
    engine.train_step(batch(plan, 5))
    for name, array in State(engine).tensors.items():
        np.testing.assert_array_equal(array, after.tensor(name), name)
    engine.load_state(before)
    changed = State(engine)
    changed.tensors[adapters.FINGERPRINT] = changed.tensors[adapters.FINGERPRINT] ^ 1
    with pytest.raises(WeightsError, match="base model's weights have changed"):
        engine.load_state(changed)


def test_the_fingerprint_is_of_values_not_of_order() -> None:
    names = [p.name for p in parameters(MODELS["llama"])]

    def fingerprint(noise: float, order: list[str]) -> list[int]:
        source = adapters.Fingerprinted(Base("llama", noise), names)
        for name in order:
            source.tensor(name)
        return source.fingerprint().tolist()

    assert fingerprint(0.1, names) == fingerprint(0.1, names[::-1])
    assert fingerprint(0.1, names) != fingerprint(0.2, names)
    ours, theirs = (State(trained(b)[0]).tensor(adapters.FINGERPRINT) for b in ("torch", "jax"))
    np.testing.assert_array_equal(ours, theirs)


def test_bf16_rounding_is_torchs() -> None:
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    array[:3] = 1.00390625, 1.01171875, -1.00390625  # halfway
    expected = torch.from_numpy(array).bfloat16().float().numpy()
    np.testing.assert_array_equal(adapters.bf16_rounded(array), expected)


def test_a_base_is_stored_in_fp16_alike_and_cut_to_its_largest() -> None:
    array = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    array[:4] = 1e6, -1e6, 65519.0, 1.00048828125
    stored = torch.empty(5000, dtype=torch.float16)
    pretrained.copy_into(stored, array, "base")
    assert torch.isfinite(stored).all()
    plan = plans.replace(Plan(), {"optimize.precision": "fp16"})
    np.testing.assert_array_equal(adapters.narrow_rounded(plan, array), stored.float().numpy())


def test_the_base_gets_no_gradient_in_torch() -> None:
    plan = plan_with("torch")
    engine = built(plan)
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    rows = batch(plan, 0)
    hidden = engine.module(torch.from_numpy(rows["inputs"][0]))
    engine.task.criterion(
        hidden, engine.module.head_weight, torch.from_numpy(rows["targets"][0])
    ).backward()
    for name, p in engine.module.named_parameters():
        assert (p.grad is not None) == (".lora_" in name), name
    engine.train_step(rows)
    for name, p in engine.module.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(p, before[name]), name


def test_jax_keeps_the_base_where_it_is() -> None:
    plan = plan_with("jax")
    engine, _ = trained("jax")
    before = {n: x.unsafe_buffer_pointer() for n, x in engine._frozen.items()}
    old = engine._train_state.weights
    engine.train_step(batch(plan, 0))
    engine.take_metrics()
    assert all(x.is_deleted() for x in old.values())
    assert {n: x.unsafe_buffer_pointer() for n, x in engine._frozen.items()} == before
    # Nothing of the base's size is computed: no gradient of the head, none of a block's matrices.
    assert step_memory(engine).output_size_in_bytes < 2 * 12 * engine.trainable_parameters


def test_what_a_run_trained_is_sampled_and_exported_with_its_adapters() -> None:
    plan, architecture = plan_with("torch"), MODELS["llama"]
    start = InitialWeights(architecture, plan.train.seed)
    engine = built(plan, weights=start)
    for step in range(3):
        engine.train_step(batch(plan, step))
    state: Any = State(engine)
    found = TrainedModel(plan, architecture, state, Path("tokenizer.json"))
    found.check_base()
    again = torch_engine.create(plan, None)
    found.build(again)
    rows = batch(plan, 0)
    assert again.evaluate([rows]).loss == engine.evaluate([rows]).loss
    merged = built(
        plan_with("torch", {"optimize.lora_rank": 0, "optimize.freeze_base": False}), weights=found
    )
    assert merged.evaluate([rows]).loss == pytest.approx(engine.evaluate([rows]).loss, rel=1e-5)
    assert merged.evaluate([rows]).loss != built(plan, weights=start).evaluate([rows]).loss
    other = TrainedModel(plans.replace(plan, {"train.seed": 1}), architecture, state, Path())
    with pytest.raises(WeightsError, match="base model's weights have changed"):
        other.check_base()
