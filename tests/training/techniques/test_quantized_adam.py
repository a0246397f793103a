"""8-bit AdamW: one specification, the same codes in both backends, a fraction of the bytes, the same loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from memconsole.memory.state.optimizer_state import state_bytes
from memconsole.memory.state.sizes import sizes
from memconsole.plan import plan as plans
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import EIGHT_BIT
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_jax import engine as jax_engine
from memconsole_jax.techniques.optimizer import quantized_adam as in_jax
from memconsole_torch import engine as torch_engine
from memconsole_torch.techniques.optimizer import quantized_adam as in_torch
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch
from memconsole_trainer.techniques import blockwise
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import reference

torch.set_num_threads(1)
VECTORS = json.loads((Path(__file__).parents[2] / "data" / "blockwise_vectors.json").read_text())
CASES = [pytest.param(c, id=c["name"]) for c in VECTORS["cases"]]
MODEL = Architecture(
    family="llama",
    vocab_size=64,
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate_size=150,  # 9,600 elements: 37.5 blocks
    max_positions=64,
)
LENGTH = 24


def quantized_by(backend: str, array: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    if backend == "numpy":
        return reference.quantize(array, signed=signed)
    if backend == "jax":
        codes, scales = jax.jit(lambda x: in_jax.quantize(x, signed=signed))(array)
        return np.asarray(codes), np.asarray(scales)
    slices = in_torch.Buffers(torch.device("cpu"))
    views = slices.views(array.size)
    views.blocks[signed].zero_()
    views.moments[signed].copy_(torch.from_numpy(array))
    codes = torch.empty(array.size, dtype=torch.uint8)
    scales = torch.empty(blockwise.scales_of(array.size))
    slices.quantize(codes, scales, signed=signed)
    return codes.numpy(), scales.numpy()


def dequantized_by(backend: str, codes: np.ndarray, scales: np.ndarray, signed: bool) -> np.ndarray:
    if backend == "numpy":
        return reference.dequantize(codes, scales, signed=signed)
    if backend == "jax":
        return np.asarray(
            jax.jit(lambda c, s: in_jax.dequantize(c, s, signed=signed))(codes, scales)
        )
    slices = in_torch.Buffers(torch.device("cpu"))
    slices.views(codes.size).blocks[signed].fill_(math.nan)
    found = slices.dequantize(torch.from_numpy(codes), torch.from_numpy(scales), signed=signed)
    return found.numpy().copy()


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_one_of_the_vectors(signed: bool) -> None:
    expected = VECTORS["signed_values" if signed else "unsigned_values"]
    assert blockwise.values(signed=signed).tolist() == expected
    assert len(set(expected)) == 256


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("case", CASES)
def test_codes_scales_and_the_way_back_are_those_of_the_vectors(backend: str, case: Any) -> None:
    array = np.array(case["input"], np.float32)
    codes, scales = quantized_by(backend, array, case["signed"])
    assert scales.tolist() == case["scales"]
    assert codes.tolist() == case["codes"]
    table = np.array(VECTORS["signed_values" if case["signed"] else "unsigned_values"], np.float32)
    expected = table[case["codes"]] * np.repeat(scales, 256)[: array.size]
    found = dequantized_by(backend, codes, scales, case["signed"])
    np.testing.assert_array_equal(found, expected)
    if not case["signed"]:  # the signed map has no -1: a block whose largest is negative shrinks
        np.testing.assert_array_equal(quantized_by(backend, found, False)[0], codes)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(-30, 30), st.floats(0, 15))
def test_a_positive_second_moment_never_becomes_zero(
    seed: int, scale: float, spread: float
) -> None:
    random = np.random.default_rng(seed)
    array = (10 ** (scale + random.uniform(-spread, 0, 700))).astype(np.float32)
    array[::7] = 0
    for backend in ("numpy", "torch"):
        found = dequantized_by(backend, *quantized_by(backend, array, False), False)
        assert ((found > 0) == (array > 0)).all()


def test_one_map_step_is_the_largest_error() -> None:
    random = np.random.default_rng(0)
    array = random.standard_normal(100_000).astype(np.float32)
    found = reference.dequantize(*reference.quantize(array, signed=True), signed=True)
    error = float(np.sqrt(np.mean((found - array) ** 2) / np.mean(array**2)))
    assert error < 0.012  # 1.1 % in the paper's data type, whatever the library


@pytest.mark.slow  # to the bit only where XLA optimizes fully
def test_the_same_gradients_give_the_same_codes_in_both_backends() -> None:
    """Over 12 steps, in several slices, with ragged tails, on a stack of three matrices."""
    random = np.random.default_rng(0)
    shape = (3, 70, 101)
    start = random.standard_normal(shape).astype(np.float32)
    weights = [torch.nn.Parameter(torch.from_numpy(w.copy())) for w in start]
    groups = [{"params": weights, "lr": 1e-3}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_torch, "CPU_SLICE", 2048)
        optimizer = in_torch.QuantizedAdamW(groups, (0.9, 0.999), 1e-8, weights)
        rule = in_jax.scale_by_quantized_adam(0.9, 0.999, 1e-8, {"w": True}, 1024)
        state, stacked = rule.init({"w": jnp.asarray(start)}), jnp.asarray(start)
        update = jax.jit(rule.update)
        for _ in range(12):
            gradient = random.standard_normal(shape) * 10 ** random.uniform(-5, 0, shape)
            gradient = gradient.astype(np.float32)
            for weight, g in zip(weights, gradient, strict=True):
                weight.grad = torch.from_numpy(g)
            optimizer.step()
            updates, state = update({"w": jnp.asarray(gradient)}, state)
            stacked = stacked - 1e-3 * updates["w"]
            for slot in ("first_codes", "first_scales", "second_codes", "second_scales"):
                ours = np.stack([optimizer.state[w][slot].numpy() for w in weights])
                np.testing.assert_array_equal(ours, np.asarray(getattr(state, slot)["w"]))
    ours = np.stack([w.detach().numpy() for w in weights])
    # An update is m / (sqrt(v) + eps): its last bits differ, the moments do not.
    np.testing.assert_allclose(ours, np.asarray(stacked), atol=2e-4)


def plan_with(backend: str, **changes: Any) -> Plan:
    base = {
        "backend": backend,
        "device.name": "cpu",
        "data.sequence_length": LENGTH,
        "train.batch_size": 4,
        "train.learning_rate": 3e-3,
        "train.warmup_steps": 5,
        "train.sample_tokens": 0,
        "optimize.fused_loss": False,
        "optimize.gradient_checkpointing": "none",
        "optimize.precision": "fp32",
        "optimize.optimizer": "adamw-8bit",
    }
    plan = plans.replace(Plan(), base | {k.replace("__", "."): v for k, v in changes.items()})
    check_trainable(plan)
    return plan


COMPOSED = {
    "optimize__gradient_checkpointing": "full",
    "optimize__fused_loss": True,
    "optimize__accumulation_steps": 2,
    "optimize__precision": "bf16",
    "train__batch_size": 2,
}


def built(plan: Plan, steps: int = 200) -> Any:
    module: Any = torch_engine if plan.backend == "torch" else jax_engine
    engine = module.create(plan, None)
    engine.build(plan, MODEL, steps, InitialWeights(MODEL, 0))
    return engine


def rows(plan: Plan, step: int) -> Batch:
    """Text of a fixed random chain: each token has four successors."""
    successors = np.random.default_rng(0).integers(0, 64, (64, 4))
    random = np.random.default_rng(1000 + step)
    many = plan.optimize.accumulation_steps * plan.train.batch_size
    tokens = np.empty((many, LENGTH + 1), np.int32)
    tokens[:, 0] = random.integers(0, 64, many)
    for t in range(LENGTH):
        tokens[:, t + 1] = successors[tokens[:, t], random.integers(0, 4, many)]
    tokens = tokens.reshape(plan.optimize.accumulation_steps, plan.train.batch_size, -1)
    return language_batch(tokens[..., :-1].copy(), tokens[..., 1:].copy())


def trained(engine: Any, plan: Plan, steps: int, start: int = 0) -> list[float]:
    for step in range(start, start + steps):
        engine.train_step(rows(plan, step))
    return [m.loss for m in engine.take_metrics()]


def stored(engine: Any) -> Any:
    tensors = {name: np.array(array) for name, array in engine.state()}

    class Source:
        def names(self) -> list[str]:
            return list(tensors)

        def tensor(self, name: str) -> np.ndarray:
            return tensors[name]

    return Source()


@cache
def long_run(backend: str, optimizer: str, composed: bool = False) -> tuple[Any, list[float]]:
    """An engine after 200 steps (composed: 12) and its losses."""
    changes = COMPOSED if composed else {}
    plan = plan_with(backend, optimize__optimizer=optimizer, **changes)
    engine = built(plan)
    return engine, trained(engine, plan, 12 if composed else 200)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    yield
    long_run.cache_clear()


@pytest.mark.parametrize("optimizer", EIGHT_BIT)
def test_two_hundred_steps_end_where_32_bit_adamw_ends(optimizer: str) -> None:
    exact = long_run("torch", "adamw")[1]
    narrow = long_run("torch", optimizer)[1]
    assert narrow != exact
    assert exact[0] > 4.0
    assert np.mean(exact[-20:]) < 2.0  # it learned the chain, whose entropy is at most log 4
    assert abs(np.mean(narrow[-20:]) / np.mean(exact[-20:]) - 1) < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("narrow", EIGHT_BIT)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_thousand_steps_end_within_half_a_percent_of_32_bit_adamw(
    backend: str, narrow: str
) -> None:
    ends = []
    for optimizer in ("adamw", narrow):
        plan = plan_with(backend, optimize__optimizer=optimizer)
        losses = trained(built(plan, 1000), plan, 1000)
        ends.append(np.mean(losses[-50:]))
    assert ends[0] < 1.6
    assert ends[0] != ends[1]
    assert abs(ends[1] / ends[0] - 1) < 0.005, ends


@pytest.mark.parametrize("optimizer", EIGHT_BIT)
def test_both_backends_take_the_same_200_steps(optimizer: str) -> None:
    ours, theirs = long_run("torch", optimizer)[1], long_run("jax", optimizer)[1]
    assert np.abs(np.array(ours) / np.array(theirs) - 1).max() < 0.01


def test_it_composes_with_accumulation_checkpointing_bf16_and_the_chunked_loss() -> None:
    ours, theirs = (long_run(b, "adamw-8bit", composed=True)[1] for b in ("torch", "jax"))
    plain = long_run("torch", "adamw-8bit")[1]
    assert np.abs(np.array(ours) / np.array(theirs) - 1).max() < 0.01
    assert np.abs(np.array(ours) / np.array(plain[:12]) - 1).max() < 0.02


@pytest.mark.parametrize(
    ("optimizer", "roles"),
    [("adamw-8bit", ("matrix",)), ("adamw8-all", ("matrix", "embedding"))],
)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_state_is_two_bytes_where_it_should_be_and_what_the_estimate_says(
    backend: str, optimizer: str, roles: tuple[str, ...]
) -> None:
    moments: dict[str, int] = {}
    for name, array in stored_items(long_run(backend, optimizer)[0]):
        owner = next((p.name for p in parameters(MODEL) if p.name in name), None)
        if name.startswith("optimizer.") and owner:
            moments[owner] = moments.get(owner, 0) + array.nbytes
    narrow = {p.name for p in parameters(MODEL) if p.role in roles and p.size >= 4096}
    assert {p.role for p in parameters(MODEL) if p.name in narrow} == set(roles)
    assert 0 < len(narrow) < len(moments)
    for p in parameters(MODEL):
        most = 2.1 * p.size if p.name in narrow else 8 * p.size
        assert 0.9 * most < moments[p.name] <= most, p.name
    estimate = state_bytes(optimizer, sizes(MODEL).used)
    assert sum(moments.values()) == pytest.approx(estimate, rel=1e-3)


def stored_items(engine: Any) -> list[tuple[str, np.ndarray]]:
    return [(name, array) for name, array in engine.state()]


class Largest(TorchDispatchMode):
    """The most elements any operation's new result has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, x.numel())
        return result


def test_threads_update_slices_as_one_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_torch, "THREAD_SLICE", 2048)
    ended = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        shapes = ((70, 150), (64, 96))
        weights = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        group = {"params": weights, "weight_decay": 0.1}
        optimizer = in_torch.QuantizedAdamW([group], (0.9, 0.95), 1e-8, weights)
        optimizer.param_groups[0]["lr"] = 1e-2
        for _ in range(3):
            for p in weights:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        assert torch.get_num_threads() == threads
        states = [optimizer.state[p][name] for p in weights for name in optimizer.state[p]]
        ended.append([*weights, *states])
    torch.set_num_threads(1)
    for one, several in zip(*ended, strict=True):
        assert torch.equal(one, several)


def test_a_torch_step_makes_no_temporary_beyond_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_torch, "CPU_SLICE", 1024)
    weight = torch.nn.Parameter(torch.ones(200_000))
    weight.grad = torch.ones_like(weight)
    optimizer = in_torch.QuantizedAdamW([{"params": [weight]}], (0.9, 0.999), 1e-8, [weight])
    with Largest() as largest:
        optimizer.step()
    assert largest.elements <= 2**16  # the lookup table


def test_a_jax_step_needs_no_copy_of_a_moment_or_weight() -> None:
    def temporary(elements: int) -> int:
        rule = in_jax.scale_by_quantized_adam(0.9, 0.999, 1e-8, {"w": False}, 4096)

        def step(weights: Any, state: Any, gradients: Any) -> Any:
            updates, state = rule.update(gradients, state)
            return jax.tree.map(lambda w, u: w - 1e-3 * u, weights, updates), state, updates

        weights = {"w": jax.ShapeDtypeStruct((elements,), jnp.float32)}
        state = jax.eval_shape(rule.init, weights)
        program = jax.jit(step, donate_argnums=(0, 1, 2)).lower(weights, state, weights).compile()
        return int(program.memory_analysis().temp_size_in_bytes)

    small, large = temporary(2**16), temporary(2**20)
    assert large - small < 2**18  # a quarter of a byte for each element more


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_resumed_run_continues_bit_for_bit(backend: str) -> None:
    engine, _ = long_run(backend, "adamw-8bit")
    plan = plan_with(backend)
    before = stored(engine)
    again = trained(engine, plan, 3, start=200)
    after = stored(engine)
    engine.load_state(before)
    assert trained(engine, plan, 3, start=200) == again
    for name in after.names():
        np.testing.assert_array_equal(after.tensor(name), stored(engine).tensor(name), name)
