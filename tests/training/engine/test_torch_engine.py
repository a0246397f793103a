"""The torch engine trains what it says: accumulation, precision, resume, evaluation, sampling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memconsole.plan import plan as plans
from memconsole.plan.machine.compilers import missing_compiler
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan, PlanError
from memconsole_torch import devices
from memconsole_torch.engine import TorchEngine, create
from memconsole_torch.models.generate import choose
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch, Sampling
from memconsole_trainer.schedule import learning_rate
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models
from tests.training.harness.grids import spread
from tests.training.harness.torch_comparison import gradients, logits

torch.set_num_threads(1)
LLAMA = tiny_models.ARCHITECTURES["llama"]
GEARHEAD = Architecture(
    family="gpt2",
    **{**tiny_models.SIZES, "kv_heads": 4},
    norm="layernorm",
    biases=True,
    gated_mlp=False,
    activation="gelu_tanh",
    positions="learned",
    auxiliary_rows=10,
    diagnostic_classes=4,
)
LENGTH = 24


def a_plan(**changes: Any) -> Plan:
    base = {
        "device.name": "cpu",
        "data.sequence_length": LENGTH,
        "train.warmup_steps": 2,
        "train.sample_tokens": 0,
        "train.learning_rate": 1e-2,
    }
    return plans.replace(Plan(), base | {k.replace("__", "."): v for k, v in changes.items()})


def an_engine(plan: Plan, architecture: Architecture = LLAMA, steps: int = 20) -> TorchEngine:
    engine = create(plan, None)
    engine.build(plan, architecture, steps, InitialWeights(architecture, plan.train.seed))
    return engine


def state_of(engine: TorchEngine) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in engine.state()}


class CheckpointInMemory:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def plain_sgd(**changes: Any) -> Plan:
    """A plan whose one step subtracts exactly the gradient: the rate is 1, nothing decays or clips."""
    return a_plan(
        **{
            "optimize__optimizer": "sgd",
            "train__beta1": 0.0,
            "train__grad_clip": 0.0,
            "train__weight_decay": 0.0,
            "train__learning_rate": 1.0,
            "train__warmup_steps": 0,
            "train__schedule": "constant",
        }
        | changes
    )


def step_taken(plan: Plan, batch: Batch) -> tuple[dict[str, np.ndarray], float]:
    """What one step changed, by tensor, and the loss it reported."""
    engine = an_engine(plan)
    before = state_of(engine)
    engine.train_step(batch)
    (metrics,) = engine.take_metrics()
    after = state_of(engine)
    changes = {n: after[n] - before[n] for n in after if n.startswith("model.")}
    return changes, metrics.loss


@pytest.mark.parametrize("fused", [False, True], ids=["whole-loss", "chunked-loss"])
def test_accumulating_four_ragged_masked_micro_batches_equals_one_large_batch(fused: bool) -> None:
    small = tiny_models.batch(4, 2, LENGTH, masked=0.4)
    small["targets"][1, :, 3:] = -100  # micro-batches with very different numbers of targets
    small["targets"][2] = -100  # and one with none
    small = language_batch(small["inputs"], small["targets"])
    large = language_batch(
        small["inputs"].reshape(1, 8, LENGTH), small["targets"].reshape(1, 8, LENGTH)
    )
    plan = plain_sgd(optimize__fused_loss=fused)
    one, one_loss = step_taken(plan, large)
    four, four_loss = step_taken(plan, small)
    assert four_loss == pytest.approx(one_loss, rel=1e-6)
    for name, change in one.items():
        np.testing.assert_allclose(four[name], change, atol=1e-6, err_msg=name)
    assert max(np.abs(change).max() for change in one.values()) > 1e-3


def test_the_reported_loss_is_the_mean_over_unmasked_tokens() -> None:
    batch = tiny_models.batch(2, 3, LENGTH, masked=0.5)
    weights = InitialWeights(LLAMA, 42)
    scores = np.stack([logits(LLAMA, weights, rows) for rows in batch["inputs"]]).astype(np.float64)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    kept = batch["targets"] != -100
    chosen = np.take_along_axis(scores, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    expected = -chosen[kept].mean()

    engine = an_engine(a_plan())
    found = engine.evaluate([batch, batch])
    assert found.weight == 2 * kept.sum()
    assert found.mean == pytest.approx(expected, rel=1e-6)
    engine.train_step(batch)
    assert engine.take_metrics()[0].loss == pytest.approx(expected, rel=1e-6)


def test_the_step_subtracts_the_gradient_of_the_mean_loss() -> None:
    batch = tiny_models.batch(2, 2, LENGTH, masked=0.3)
    changes, _ = step_taken(plain_sgd(), batch)
    expected = gradients(LLAMA, InitialWeights(LLAMA, 42), batch)
    for name, gradient in expected.items():
        np.testing.assert_allclose(changes[f"model.{name}"], -gradient, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "kind"),
    spread(
        [
            {"optimize__gradient_checkpointing": "full"},
            {"optimize__gradient_checkpointing": "selective"},
            {"optimize__gradient_checkpointing": "attention"},
            {"optimize__fused_loss": True},
            {"optimize__fused_loss": True, "optimize__gradient_checkpointing": "full"},
        ],
        ["gpt2", "gemma3"],
    ),
    ids=str,
)
def test_memory_optimizations_do_not_change_what_is_learned(
    kind: str, changes: dict[str, Any]
) -> None:
    architecture = tiny_models.ARCHITECTURES[kind]
    batches = [tiny_models.batch(1, 3, LENGTH, seed=n, masked=0.2) for n in range(3)]
    plain = an_engine(plain_sgd(train__learning_rate=0.1), architecture)
    lean = an_engine(plain_sgd(train__learning_rate=0.1, **changes), architecture)
    for batch in batches:
        plain.train_step(batch)
        lean.train_step(batch)
    for one, other in zip(plain.take_metrics(), lean.take_metrics(), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
    expected = state_of(plain)
    for name, array in state_of(lean).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("fused", [False, True], ids=["whole-loss", "chunked-loss"])
def test_bf16_computes_in_16_bits_and_keeps_everything_else_in_32(fused: bool) -> None:
    plan = a_plan(optimize__precision="bf16", optimize__fused_loss=fused)
    engine, reference = an_engine(plan), an_engine(a_plan())
    seen: set[torch.dtype] = set()
    engine.module.layers[1].mlp.up.register_forward_hook(lambda m, i, y: seen.add(y.dtype))
    for n in range(5):
        batch = tiny_models.batch(2, 2, LENGTH, seed=n)
        engine.train_step(batch)
        reference.train_step(batch)
    assert seen == {torch.bfloat16}
    assert {values.dtype for _, _, values in engine._metrics} == {torch.float32}
    assert {a.dtype for n, a in engine.state() if n != "optimizer.step"} == {np.dtype("float32")}
    found, expected = engine.take_metrics(), reference.take_metrics()
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-3)
        assert one.loss != other.loss


def test_small_bf16_updates_are_not_lost() -> None:
    """Steps below half of bf16's spacing must add up in the fp32 masters."""
    plan = a_plan(
        optimize__precision="bf16",
        optimize__optimizer="lion",
        train__weight_decay=0.0,
        train__learning_rate=1e-6,
        train__schedule="constant",
        train__warmup_steps=0,
    )
    engine = an_engine(plan)
    before = state_of(engine)["model.norm.weight"]
    batch = tiny_models.batch(1, 4, LENGTH)
    for _ in range(10):
        engine.train_step(batch)
    moved = np.abs(state_of(engine)["model.norm.weight"] - before)
    assert moved.max() == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "adafactor"])
def test_resuming_continues_bit_for_bit(optimizer: str) -> None:
    plan = a_plan(optimize__optimizer=optimizer)
    batches = [tiny_models.batch(2, 2, LENGTH, seed=n) for n in range(7)]
    whole = an_engine(plan)
    for batch in batches[:3]:
        whole.train_step(batch)
    whole.take_metrics()
    saved = CheckpointInMemory(state_of(whole))
    for batch in batches[3:]:
        whole.train_step(batch)

    resumed = create(plan, None)
    resumed.build(plan, LLAMA, 20, InitialWeights(LLAMA, 999))
    addresses = [p.data_ptr() for p in resumed.module.parameters()]
    resumed.load_state(saved)
    assert [p.data_ptr() for p in resumed.module.parameters()] == addresses
    for batch in batches[3:]:
        resumed.train_step(batch)
    assert resumed.take_metrics() == whole.take_metrics()
    expected = state_of(whole)
    for name, array in state_of(resumed).items():
        assert np.array_equal(array, expected[name]), name


class Reads(TorchDispatchMode):
    """Counts scalars read from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += operation in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.is_nonzero.default,
        )
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd", "adafactor"])
def test_no_step_reads_a_number_back(optimizer: str) -> None:
    plan = a_plan(optimize__optimizer=optimizer, optimize__fused_loss=True)
    engine = an_engine(plan, tiny_models.ARCHITECTURES["gemma3"])
    with Reads() as reads:
        for n in range(3):
            engine.train_step(tiny_models.batch(2, 2, LENGTH, seed=n))
        assert reads.count == 0
        torch.ones(1).item()
        assert reads.count == 1
    metrics = engine.take_metrics()
    assert [m.step for m in metrics] == [1, 2, 3]
    assert engine.take_metrics() == []


def test_the_learning_rate_follows_the_schedule() -> None:
    plan = a_plan()
    engine = an_engine(plan, steps=6)
    for n in range(6):
        engine.train_step(tiny_models.batch(1, 1, LENGTH, seed=n))
    rates = [m.learning_rate for m in engine.take_metrics()]
    assert rates == [learning_rate(step, plan, 6) for step in range(6)]
    assert rates[1] == 1e-2
    assert rates[-1] == pytest.approx(1e-3)


def test_the_gradient_norm_is_the_one_before_clipping() -> None:
    batch = tiny_models.batch(1, 2, LENGTH)
    expected = gradients(LLAMA, InitialWeights(LLAMA, 42), batch)
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()))
    plan = plans.replace(plain_sgd(), {"train.grad_clip": norm / 3})
    engine = an_engine(plan)
    before = state_of(engine)
    engine.train_step(batch)
    assert engine.take_metrics()[0].gradient_norm == pytest.approx(norm, rel=1e-5)
    change = state_of(engine)["model.embedding.weight"] - before["model.embedding.weight"]
    np.testing.assert_allclose(change, -expected["embedding.weight"] / 3, atol=1e-6)


def test_unused_weights_are_kept_saved_counted_and_never_trained() -> None:
    engine = an_engine(a_plan(), GEARHEAD)
    unused = [p for p in parameters(GEARHEAD) if not p.used]
    assert engine.parameters == sum(p.size for p in parameters(GEARHEAD))
    assert engine.trainable_parameters == engine.parameters - sum(p.size for p in unused)
    before = state_of(engine)
    engine.train_step(tiny_models.batch(1, 2, LENGTH))
    after = state_of(engine)
    assert len(unused) == 3
    for parameter in unused:
        assert np.array_equal(before[f"model.{parameter.name}"], after[f"model.{parameter.name}"])
        assert f"optimizer.{parameter.name}.exp_avg" not in after
    assert not np.array_equal(before["model.norm.bias"], after["model.norm.bias"])


def test_weight_decay_spares_norms_and_biases() -> None:
    plan = a_plan(train__weight_decay=0.5, train__learning_rate=0.1, train__warmup_steps=0)
    engine = an_engine(plan, GEARHEAD)
    before = state_of(engine)
    nothing = tiny_models.batch(1, 2, LENGTH, masked=1.0)
    engine.train_step(nothing)
    after = state_of(engine)
    for parameter in parameters(GEARHEAD):
        factor = 1 - 0.1 * 0.5 if parameter.used and parameter.decays else 1.0
        name = f"model.{parameter.name}"
        np.testing.assert_allclose(after[name], before[name] * factor, atol=1e-7, err_msg=name)


def test_training_learns() -> None:
    engine = an_engine(a_plan(), steps=30)
    batch = tiny_models.batch(2, 2, LENGTH)
    for _ in range(30):
        engine.train_step(batch)
    losses = [m.loss for m in engine.take_metrics()]
    assert losses[0] == pytest.approx(np.log(96), rel=0.02)
    assert losses[-1] < 0.5 * losses[0]


def test_sampling_repeats_with_its_seed() -> None:
    engine = an_engine(a_plan(), GEARHEAD)
    prompt = list(range(10))
    first = engine.generate(prompt, 100, Sampling(1.0, seed=5))
    assert len(first) == 100
    assert all(0 <= token < 96 for token in first)
    assert engine.generate(prompt, 100, Sampling(1.0, seed=5)) == first
    assert engine.generate(prompt, 100, Sampling(1.0, seed=6)) != first
    greedy = engine.generate(prompt, 8)
    expected = logits(GEARHEAD, InitialWeights(GEARHEAD, 42), np.array([prompt], np.int32))
    assert greedy[0] == expected[0, -1].argmax()
    assert engine.generate(prompt, 8, Sampling(1.0, top_k=1, seed=2)) == greedy


def test_sampling_draws_by_probability_among_the_likeliest() -> None:
    random = np.random.default_rng(0)
    scores = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    draws = [choose(scores, Sampling(1.0), random) for _ in range(4000)]
    shares = np.bincount(draws, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=0.03)
    assert {choose(scores, Sampling(1.0, 2), random) for _ in range(100)} == {2, 3}


def test_the_memory_reading_grows_by_weights_and_moments() -> None:
    wide = {**tiny_models.SIZES, "vocab_size": 20_000, "hidden_size": 256}
    architecture = Architecture(family="llama", **wide)
    engine = create(a_plan(), None)
    engine.build(a_plan(), architecture, 10, InitialWeights(architecture, 0))
    reading = engine.memory()
    expected = 12 * engine.parameters  # fp32 weights and two moments
    assert reading.allocated_bytes is not None
    assert 0.9 * expected < reading.allocated_bytes < 1.4 * expected
    assert reading.peak_bytes is not None
    assert reading.peak_bytes >= reading.allocated_bytes


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cuda:7", "torch finds 0 CUDA"),
        ("mps", "no Apple GPU"),
        ("tpu", 'set backend = "jax"'),
        ("rtx-3060-12gb", "for planning"),
        ("cuda:x", "for planning"),
    ],
)
def test_a_device_that_is_not_here_is_refused_with_a_way_out(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(PlanError, match=why) as caught:
        create(a_plan(device__name=name), None)
    assert caught.value.key == "device.name"
    assert "auto | cpu" in str(caught.value)


def test_auto_prefers_cuda_then_mps_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = plans.DeviceChoice()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert devices.resolve(choice).type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.resolve(choice).type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.resolve(choice) == torch.device("cuda", 0)


def test_the_platform_lines_say_what_is_on() -> None:
    plain = create(a_plan(), None).platform_lines()
    assert plain[0].startswith("Detected platform: CPU (")
    assert plain[1] == "Precision: float32"
    assert plain[3].startswith("Heap: keeps")
    assert len(plain) == 4
    lean = a_plan(
        optimize__precision="bf16",
        optimize__gradient_checkpointing="full",
        optimize__accumulation_steps=4,
        optimize__fused_loss=True,
    )
    lines = "\n".join(create(lean, None).platform_lines())
    for part in ("bfloat16", "remat", "4 steps (effective batch 64)", "Chunked loss"):
        assert part in lines


def test_too_long_rows_are_refused() -> None:
    with pytest.raises(PlanError, match="128 positions"):
        an_engine(a_plan(data__sequence_length=129), GEARHEAD)


def test_compiling_without_a_compiler_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(PlanError, match=r"g\+\+ or clang"):
        create(a_plan(optimize__compile=True), None)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled_and_checkpointed_training_equals_plain(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: one graph serves every block, and sampling compiles nothing."""
    if compiler == "inductor" and missing_compiler("cpu"):
        pytest.skip("no C++ compiler on this machine")
    inductor = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda m: inductor(m, backend=compiler))
    plan = plain_sgd(train__learning_rate=0.1)
    lean = plans.replace(
        plan, {"optimize.compile": True, "optimize.gradient_checkpointing": "selective"}
    )
    plain, compiled = an_engine(plan), an_engine(lean)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for n in range(2):
        batch = tiny_models.batch(1, 2, LENGTH, seed=n)
        plain.train_step(batch)
        compiled.train_step(batch)
    assert compiled.generate([1, 2], 3) == plain.generate([1, 2], 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for one, other in zip(plain.take_metrics(), compiled.take_metrics(), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
    expected = state_of(plain)
    for name, array in state_of(compiled).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, err_msg=name)
