"""16-bit training: stochastically rounded bf16 weights, fp16's loss scale, and what they save and leave the same."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from memconsole.memory import seconds
from memconsole.memory.activations import jax_step
from memconsole.memory.activations.torch_step import moments
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.machine.processor import (
    has_512_bit_units,
    missing_instructions,
    prefers_onednn,
    slow_vectors,
    slower_than_fp32,
    wide_vectors,
)
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.techniques.weights import precision as jax_precision
from memconsole_jax.techniques.weights.rounding import Rounding
from memconsole_jax.tracing import trace_targets
from memconsole_torch import engine as torch_engine
from memconsole_torch.techniques.optimizer.stochastic import round_into
from memconsole_torch.tracing.trace_liveness import Liveness
from memconsole_trainer.techniques import loss_scale, rounding
from memconsole_trainer.weights.initialize import InitialWeights
from tests.accuracy.torch_formula import TRAINING
from tests.training.harness import adapted, offloaded, reference, tiny_models
from tests.training.harness.adapted import LENGTH, MODELS, batch, built
from tests.training.harness.planned_step import planned_step
from tests.training.harness.torch_processes import plan_of, steps_of

torch.set_num_threads(1)
BACKENDS = ("torch", "jax")
STEPS = 30
NARROW = {"optimize.precision": "bf16-sr"}
EVERYTHING = {
    "optimize.gradient_checkpointing": "full",
    "optimize.fused_loss": True,
    "optimize.accumulation_steps": 2,
    "optimize.optimizer": "adamw8-all",
    "train.batch_size": 2,
    "train.ema_decay": 0.9,
}
ROWS = 128
DEEP = Architecture(
    family="llama", vocab_size=96, hidden_size=64, layers=8, heads=4, kv_heads=4, head_size=16,
    intermediate_size=128, max_positions=64,
)  # fmt: skip
RATE = {"train.learning_rate": 3e-3}


def plan_with(backend: str, changes: dict[str, Any]) -> Plan:
    return offloaded.plan_with(backend, {**RATE, **changes})


def trained(backend: str, changes: dict[str, Any], steps: int = STEPS) -> tuple[Any, list[float]]:
    return offloaded.stepped(backend, {**RATE, **changes}, steps)


def in_numpy(array: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    bits = reference.random_bits(key, array.size)
    return reference.rounded(array.reshape(-1), bits).reshape(array.shape)


def test_both_backends_round_a_weight_to_the_bits_of_the_specification() -> None:
    plan, model = plan_with("jax", NARROW), MODELS["llama"]
    index, weight = next(
        (i, p) for i, p in enumerate(parameters(model)) if p.name == "embedding.weight"
    )
    array = np.random.default_rng(0).standard_normal(weight.shape).astype(np.float32)
    key = rounding.tensor_key(plan.train.seed, 7, index)
    expected = in_numpy(array, key)
    found = Rounding(plan, model)(weight.name, jnp.asarray(array), jnp.float32, jnp.uint32(7))
    np.testing.assert_array_equal(np.asarray(found), expected)
    target = torch.empty(array.size, dtype=torch.bfloat16)
    round_into(target, torch.from_numpy(array.reshape(-1).copy()), key, 0)
    np.testing.assert_array_equal(target.float().numpy(), expected.reshape(-1))
    parts = torch.empty_like(target)
    for first, end in pairwise((0, 100, 1500, 4096, 5021, array.size)):
        values = torch.from_numpy(array.reshape(-1)[first:end].copy())
        round_into(parts[first:end], values, key, first)
    assert torch.equal(parts, target), "slices need not begin with a block of the generator"
    other = in_numpy(array, rounding.tensor_key(plan.train.seed, 8, index))
    assert 0.2 < np.mean(other != expected) < 0.8  # each step has bits of its own


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0xFD36D048, 0x2D17272C)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_the_generator_gives_the_words_its_authors_publish(
    key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
) -> None:
    """Random123's known answers of Threefry-2x32 with 13 rounds."""
    words = [np.array([n], np.uint32) for n in (*key, *counter)]
    found = rounding.threefry((words[0], words[1]), (words[2], words[3]))
    assert tuple(int(word[0]) for word in found) == expected


def test_rounding_is_right_on_average_and_to_one_of_the_two_neighbours() -> None:
    value, times = np.float32(1.0 + 0.3 * 2**-7), 4096
    found = in_numpy(np.full(times, value), rounding.tensor_key(1, 2, 3))
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    deviation = 2**-7 * math.sqrt(0.3 * 0.7 / times)
    assert abs(found.mean() - value) < 4 * deviation


def test_small_updates_vanish_to_nearest_and_add_up_when_rounded_stochastically() -> None:
    update, steps = np.float32(2**-12), 512
    nearest = torch.ones(64, dtype=torch.bfloat16)
    ours = np.ones(4096, np.float32)
    for step in range(steps):
        nearest = (nearest.float() + float(update)).bfloat16()
        ours = in_numpy(ours + update, rounding.tensor_key(0, step, 0))
    assert (nearest == 1).all()
    assert ours.mean() == pytest.approx(1 + steps * update, rel=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounded_weights_train_as_fp32_does_and_begin_alike(backend: str) -> None:
    narrow, wide = trained(backend, NARROW)[1], trained(backend, {})[1]
    assert wide[-1] < wide[0] - 0.5
    assert narrow != wide
    np.testing.assert_allclose(narrow, wide, rtol=0.02)


@pytest.mark.parametrize("changes", [NARROW, NARROW | EVERYTHING], ids=["alone", "composed"])
def test_both_backends_train_rounded_weights_alike(changes: dict[str, Any]) -> None:
    (ours, losses), (theirs, others) = (trained(b, changes) for b in BACKENDS)
    np.testing.assert_allclose(losses, others, rtol=0.01)
    for engine in (ours, theirs):
        for p in parameters(MODELS["llama"]):
            stored = adapted.State(engine).tensor(f"model.{p.name}")
            wide = np.asarray(stored, np.float32)
            is_narrow = (
                wide == np.asarray(jnp.asarray(wide).astype(jnp.bfloat16), np.float32)
            ).all()
            assert is_narrow or p.role in ("norm", "bias"), p.name


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["alone", "composed"])
@pytest.mark.parametrize("precision", ["bf16-sr", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_goes_on_to_the_bit(
    backend: str, precision: str, changes: dict[str, Any]
) -> None:
    changes = {"optimize.precision": precision, **changes}
    engine, _ = trained(backend, changes, 5)
    offloaded.resumes(engine, backend, changes)


def test_rounded_weights_and_gradients_take_half_where_they_are_stored_so() -> None:
    plan, wide = plan_with("torch", NARROW), plan_with("torch", {})
    engine, _ = trained("torch", NARROW, 1)
    matrices = [p for p in parameters(MODELS["llama"]) if p.role not in ("norm", "bias")]
    stored = dict(engine.module.named_parameters())
    assert {stored[p.name].dtype for p in matrices} == {torch.bfloat16}
    assert {stored[p.name].element_size() for p in matrices} == {2}
    saved = sum(2 * p.size for p in matrices)
    for kind, backend in (("cpu", "torch"), ("gpu", "torch"), ("gpu", "jax")):
        steps = [
            step_of(plans.replace(p, {"backend": backend}), MODELS["llama"], kind)
            for p in (wide, plan)
        ]
        assert steps[0].weights - steps[1].weights == saved, (kind, backend)
        assert steps[0].gradients - steps[1].gradients == saved, (kind, backend)
    device = jax.devices("cpu")[0]
    shapes = [
        Programs.of(plans.replace(p, {"backend": "jax"}), MODELS["llama"], "gpu", device)
        for p in (wide, plan)
    ]
    held = [sum(x.size * x.dtype.itemsize for x in s.trained_shapes.values()) for s in shapes]
    assert held[0] - held[1] == saved


def measured(precision: str) -> tuple[int, int]:
    """Live bytes at the peak of a real torch step, and the estimate of it."""
    plan = plan_with("torch", {"optimize.precision": precision, "train.batch_size": ROWS})
    engine = torch_engine.create(plan, None)
    engine.build(plan, DEEP, STEPS, InitialWeights(DEEP, 1))
    tracker = Liveness()
    with tracker:
        for _, tensor in engine.saved.named():
            tracker.count(tensor)
        tracker.phase = "step"
        engine.train_step(tiny_models.batch(1, ROWS, LENGTH))
    step = step_of(plan, DEEP, "cpu")
    return tracker.peaks["step"], max(m.total for m in moments(step) if m.phase in TRAINING)


def test_the_peak_of_a_torch_step_drops_in_16_bits_as_the_estimate_says() -> None:
    found, priced = zip(*map(measured, ("fp32", "bf16", "bf16-sr")), strict=True)
    np.testing.assert_allclose(found, priced, rtol=1e-3)
    drops = -np.diff(found)
    np.testing.assert_allclose(drops, -np.diff(priced), rtol=1e-3)
    assert drops[0] > 0.35 * found[0]  # what the blocks keep
    matrices = sum(p.size for p in parameters(DEEP) if p.role not in ("norm", "bias"))
    # The peak is in the backward pass, where there are all weights and the last gradients.
    assert drops[1] == pytest.approx(4 * matrices, rel=1e-3)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_of_rounded_weights_are_bf16_unless_they_are_summed(steps: int) -> None:
    changes = {"optimize.accumulation_steps": steps, "train.batch_size": 4 // steps}
    plan = plan_with("torch", NARROW | changes)
    engine, seen = built(plan), {}
    for name, weight in engine.module.named_parameters():
        weight.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.__setitem__(name, p.grad.dtype)
        )
    engine.train_step(batch(plan, 0))
    matrix = torch.bfloat16 if steps == 1 else torch.float32
    assert seen == {
        p.name: torch.float32 if p.role in ("norm", "bias") else matrix
        for p in parameters(MODELS["llama"])
    }


def test_xla_on_a_cpu_plans_no_less_in_16_bits_and_is_priced_so() -> None:
    """It computes in fp32 whatever the program says, so that the engine keeps its weights so. What it plans for GPUs
    and TPUs needs compilers that are rarely installed."""
    small = {"optimize.optimizer": "sgd"}  # the fastest to compile
    pair, model = [plan_with("jax", small | c) for c in ({}, NARROW)], MODELS["llama"]
    planned = [planned_step(p, model, trace_targets.target("", "cpu")) for p in pair]
    assert planned[1].needed == pytest.approx(planned[0].needed, rel=0.05)
    assert planned[1].arguments == pytest.approx(planned[0].arguments, abs=64)
    priced = [
        max(m.total for m in jax_step.moments(step_of(p, model, "cpu")) if m.phase in TRAINING)
        for p in pair
    ]
    assert priced[0] == priced[1]


def test_fp16_trains_as_fp32_does_in_both_backends() -> None:
    exact = trained("torch", {})[1]
    for backend in BACKENDS:
        losses = trained(backend, {"optimize.precision": "fp16"})[1]
        assert losses != exact
        np.testing.assert_allclose(losses, exact, rtol=5e-3)


def test_both_backends_scale_the_loss_alike_after_overflows_and_good_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    monkeypatch.setattr(loss_scale, "START", 2.0**40)
    paths = []
    for backend in BACKENDS:
        plan = plan_with(backend, {"optimize.precision": "fp16"})
        engine = built(plan)
        for step in range(50):
            engine.train_step(batch(plan, step))
        paths.append([m.loss_scale for m in engine.take_metrics()])
    assert paths[0] == paths[1]
    assert paths[0][0] == 2.0**40
    assert paths[0][1] == 2.0**39
    changes = np.diff(np.log2(np.array(paths[0], np.float64)))
    assert set(changes.tolist()) == {-1.0, 0.0, 1.0}


def test_the_scale_doubles_after_so_many_good_steps_and_halves_after_a_bad_one() -> None:
    state = jnp.array([8.0, loss_scale.GROWTH_STEPS - 1, 2.0])
    grown = jax_precision.adapted(state, jnp.bool_(True))
    assert grown is not None
    assert grown.tolist() == [16.0, 0.0, 2.0]
    halved = jax_precision.adapted(state, jnp.bool_(False))
    assert halved is not None
    assert halved.tolist() == [4.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("precision", "line", "missing"),
    [
        ("bf16", "flags : fpu avx512_bf16 sse", ""),
        ("bf16", "flags : fpu amx_bf16", ""),
        ("bf16", "flags : fpu avx2", "avx512_bf16"),
        ("bf16-sr", "flags : fpu avx2", "avx512_bf16"),
        ("fp16", "flags : fpu avx512_bf16", "avx512_fp16"),
        ("fp16", "Features : fp asimdhp", ""),
        ("bf16", "Features : fp asimd", "bf16"),
        ("fp32", "flags : fpu", ""),
        ("bf16", "nothing of the kind", ""),
    ],
)
def test_a_processor_without_the_instructions_is_told(
    precision: str, line: str, missing: str, tmp_path: Path
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\n{line}\n")
    assert missing_instructions(precision, info) == missing
    assert missing_instructions(precision, tmp_path / "absent") == ""


@pytest.mark.parametrize(
    ("precision", "line", "slow"),
    [
        ("bf16", "vendor_id : GenuineIntel\nflags : fpu avx512_bf16", True),
        ("bf16", "vendor_id : AuthenticAMD\nflags : fpu avx512_bf16", False),
        ("bf16", "flags : fpu avx512_bf16 sse", True),
        ("bf16-sr", "flags : fpu avx512_bf16 sse", True),
        ("bf16", "flags : fpu avx512_bf16 amx_bf16", False),
        ("fp16", "flags : fpu avx512_bf16", False),
        ("bf16", "Features : fp bf16", False),
        ("fp32", "flags : fpu avx512_bf16", False),
    ],
)
def test_a_processor_whose_16_bit_vectors_train_slowly_is_told(
    precision: str, line: str, slow: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    assert slow_vectors(precision, tmp_path / "cpuinfo") == slow


@pytest.mark.parametrize(
    ("precision", "backend", "line", "said"),
    [
        ("bf16", "torch", "flags : fpu avx2", "far slower than in fp32"),
        ("bf16-sr", "torch", "flags : fpu avx512_bf16", "no matrix unit (AMX)"),
        ("bf16", "torch", "flags : fpu avx512_bf16 amx_bf16", ""),
        ("fp32", "torch", "flags : fpu", ""),
        (
            "bf16",
            "jax",
            "flags : fpu avx512_bf16 amx_bf16",
            "XLA on a CPU computes 16-bit types in fp32",
        ),
        ("fp32", "jax", "flags : fpu", ""),
    ],
)
def test_a_precision_that_takes_longer_than_fp32_is_told(
    precision: str, backend: str, line: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    words = slower_than_fp32(precision, backend, tmp_path / "cpuinfo")
    assert said in words
    assert bool(words) == bool(said)


@pytest.mark.parametrize(
    ("line", "wide"),
    [
        ("flags : fpu avx2 avx512f", True),
        ("flags : fpu avx2", False),
        ("Features : fp asimd", True),
        ("", True),
    ],
)
def test_the_width_of_vectors_is_told(line: str, wide: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    assert wide_vectors(tmp_path / "cpuinfo") == wide
    assert wide_vectors(tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "preferred"),
    [
        ("vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f", True),
        ("vendor_id : AuthenticAMD\nflags : fpu avx2", False),
        ("vendor_id : GenuineIntel\nflags : fpu avx512f", False),
        ("Features : fp asimd", False),
    ],
)
def test_the_processors_on_which_onednn_multiplies_faster_are_told(
    line: str, preferred: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    assert prefers_onednn(tmp_path / "cpuinfo") == preferred
    assert not prefers_onednn(tmp_path / "none")
    for family, far in ((25, False), (26, True)):
        (tmp_path / str(family)).write_text(f"cpu family : {family}\n{line}\n")
        assert has_512_bit_units(tmp_path / str(family)) == (preferred and far)
    assert not has_512_bit_units(tmp_path / "cpuinfo")


@pytest.mark.parametrize(("wide", "bf16"), [(True, 3), (False, 21)])
def test_16_bits_without_instructions_cost_more_where_vectors_are_narrow(
    wide: bool, bf16: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seconds, "wide_vectors", lambda: wide)
    monkeypatch.setattr(seconds, "missing_instructions", lambda precision: "avx512_bf16")
    seconds._speedup.cache_clear()
    assert seconds._speedup("bf16") == pytest.approx(1 / bf16)
    seconds._speedup.cache_clear()


def test_the_time_of_16_bits_on_such_a_processor_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a step that is mostly matrices, beside what `make bench` measured on an Intel processor of this kind: speeds that
    scatter by a fifth."""
    monkeypatch.setattr(seconds, "slow_vectors", lambda precision: precision != "fp32")
    monkeypatch.setattr(seconds, "missing_instructions", lambda precision: "")
    cpu = Budget(
        name="here",
        kind="cpu",
        memory_label="host RAM",
        total_bytes=2**34,
        usable_bytes=2**34,
        why="free now",
    )
    base = {"device.name": "cpu", "model.name": "gpt2", "data.sequence_length": 256}
    seconds._speedup.cache_clear()
    seconds._vector_share.cache_clear()
    plain, *others = (
        seconds.step_seconds(plan, catalog.architecture(plan), cpu)
        for plan in (
            plans.replace(Plan(), {**base, "optimize.precision": p})
            for p in ("fp32", "bf16", "fp16")
        )
    )
    assert [plain / other for other in others] == pytest.approx([0.58, 0.80], rel=0.25)
    seconds._speedup.cache_clear()
    seconds._vector_share.cache_clear()


def test_sgd_without_momentum_keeps_no_state_and_trains_weights_in_16_bits() -> None:
    plain = {"optimize.optimizer": "sgd", "train.beta1": 0.0, "train.grad_clip": 0.0}
    rounded = plain | {"optimize.precision": "bf16-sr", "optimize.accumulation_steps": 2}
    found, expected = (steps_of(plan_of(1, changes)).losses for changes in (rounded, plain))
    assert found == pytest.approx(expected, rel=2e-2)
