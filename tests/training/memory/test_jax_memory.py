"""The JAX backend's memory optimizations: the same numbers in less memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole_jax.compiled.step import TrainState, train_step
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.techniques.activations import fused_loss
from memconsole_jax.techniques.activations.fused_loss import chunked, whole
from memconsole_jax.techniques.optimizer.optimizers import transformation
from memconsole_trainer.techniques import loss_scale
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models
from tests.training.harness.jaxprs import equations

ARCHITECTURE = msgspec.structs.replace(tiny_models.ARCHITECTURES["gemma3"], layers=6)
ROWS, LENGTH = 4, 64
Step = tuple[dict[str, np.ndarray], np.ndarray, int, Any]
FAST = {"xla_backend_optimization_level": "0"}
"""Compile sooner; buffers are assigned before code is optimized."""


@pytest.fixture(autouse=True, scope="module")
def uneven_chunks() -> Iterator[None]:
    """Three chunks of 86 tokens, the last one filled up from 84."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_loss, "CPU_CHUNK_TOKENS", 100)
        yield


def one_step(
    checkpointing: str = "none",
    fused: bool = True,
    dtype: str = "fp32",
    cut: tuple[int, int] = (1, ROWS),
) -> Step:
    return _one_step(checkpointing, fused, dtype, cut)


@cache
def _one_step(checkpointing: str, fused: bool, dtype: str, cut: tuple[int, int]) -> Step:
    """Weights and [loss, norm] after one step of rows `cut` into micro-batches, temporary bytes and the program of the
    step."""
    steps, rows = cut
    plan = replace(
        Plan(),
        {
            "train.batch_size": rows,
            "train.weight_decay": 0.0,
            "optimize.accumulation_steps": steps,
            "optimize.optimizer": "sgd",
            "optimize.gradient_checkpointing": checkpointing,
            "optimize.fused_loss": fused,
            "optimize.precision": dtype,
        },
    )
    found = stacks(ARCHITECTURE)
    source = InitialWeights(ARCHITECTURE, 0)
    weights = {n: jnp.asarray(s.gather(source.tensor)) for n, s in found.items()}
    update = transformation(plan, ARCHITECTURE)
    state = TrainState(weights, update.init(weights))
    batch = tiny_models.batch(steps, rows, LENGTH, masked=0.2)
    arguments = (state, {}, dict(batch.arrays), np.float32([1.0, 0.0]))
    traced = train_step(plan, ARCHITECTURE, update).trace(*arguments)
    compiled = traced.lower().compile(FAST)
    after, metrics = compiled(*arguments)
    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(after))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return jax.tree.map(np.asarray, after.weights), np.asarray(metrics), temporary, traced.jaxpr


def assert_same(one: Any, other: Any, tolerance: float) -> None:
    """The updates (a plain gradient times the rate, clipped) and the loss agree."""
    np.testing.assert_allclose(one[1], other[1], rtol=tolerance)
    for name in one[0]:
        np.testing.assert_allclose(one[0][name], other[0][name], atol=tolerance, err_msg=name)


@pytest.mark.parametrize("mode", ["selective", "attention", "full"])
def test_checkpointing_changes_no_number(mode: str) -> None:
    assert_same(one_step(mode), one_step(), 1e-5)


def test_checkpointing_keeps_less_the_more_it_recomputes() -> None:
    modes = ("none", "selective", "attention", "full")
    none, selective, attention, full = (one_step(mode)[2] for mode in modes)
    residual = ARCHITECTURE.layers * ROWS * LENGTH * ARCHITECTURE.hidden_size * 4
    assert full < attention < selective < none
    # Full keeps one residual stream per layer. Of what none keeps, 10 more streams' worth goes.
    assert none - full > 8 * residual


def test_what_checkpointing_keeps_is_not_made_again() -> None:
    products, softmaxes = {}, {}
    for mode in ("none", "selective", "attention", "full"):
        found = [e.primitive.name for e in equations(one_step(mode)[3])]
        products[mode] = found.count("dot_general")
        softmaxes[mode] = found.count("reduce_max")
    assert products["none"] == products["selective"] < products["attention"] < products["full"]
    # The head's chunk has one, and attention's forward pass, whose logarithms its backward pass uses.
    assert softmaxes == {"none": 2, "selective": 2, "attention": 2, "full": 3}


@pytest.mark.parametrize("mode", ["none", "selective", "attention", "full"])
def test_a_sum_of_gradients_is_their_only_copy(mode: str) -> None:
    """Beside what one micro-batch needs, accumulation holds what lies outside of blocks, and no blocks' gradients."""
    found = stacks(ARCHITECTURE).items()
    blocks = sum(4 * np.prod(s.shape) for n, s in found if n.startswith("layers."))
    outside = sum(4 * np.prod(s.shape) for n, s in found if not n.startswith("layers."))
    one, several = (one_step(mode, cut=(steps, 1))[2] for steps in (1, ROWS))
    assert several - one < outside + blocks / 4


@pytest.mark.parametrize("mode", ["none", "selective", "attention", "full"])
def test_accumulation_changes_no_number(mode: str) -> None:
    assert_same(one_step(mode, cut=(ROWS, 1)), one_step(mode), 1e-5)


def test_chunked_loss_changes_no_number() -> None:
    assert_same(one_step(), one_step(fused=False), 1e-5)


def chunk_program(tokens: int) -> tuple[Any, Any]:
    hidden = jax.ShapeDtypeStruct((2, tokens // 2, 16), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((70, 16), jnp.float32)
    targets = jax.ShapeDtypeStruct((2, tokens // 2), jnp.int32)
    return tuple(
        jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head, targets).jaxpr
        for loss in (chunked, whole)
    )  # type: ignore[return-value]


def test_the_full_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "CPU_CHUNK_TOKENS", 8)

    def widest(jaxpr: Any) -> int:
        shapes = [v.aval.shape for e in equations(jaxpr) for v in e.outvars if v.aval.shape]
        return max(int(np.prod(s[:-1])) for s in shapes if s[-1] == 70)

    chunked, plain = chunk_program(96)
    assert widest(plain) == 96
    # 16 is the head's own transpose, (16, 70)
    assert widest(chunked) <= 16


def test_the_heads_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks of bf16 states: the sum over chunks must not be rounded to bf16 each time."""
    monkeypatch.setattr(fused_loss, "CPU_CHUNK_TOKENS", 8)
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(4, 128, 16)), jnp.bfloat16)
    head = jnp.asarray(random.normal(size=(70, 16)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 70, (4, 128)), jnp.int32).at[:, :9].set(-100)
    by_hidden, by_head = jax.jit(jax.grad(chunked, argnums=(0, 1)))(hidden, head, targets)
    exact = jax.jit(jax.grad(whole, argnums=(0, 1)))(
        hidden.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32), targets
    )
    assert by_head.dtype == jnp.float32
    assert by_hidden.dtype == jnp.bfloat16
    error = np.abs(by_head - exact[1]).max() / np.abs(exact[1]).max()
    assert error < 2e-3  # bf16 sums would lose some 2**-8 at each of 64 chunks
    assert np.abs(by_hidden.astype(jnp.float32) - exact[0]).max() < 2e-2
    assert not np.abs(by_hidden[:, :9]).any()


def test_bf16_keeps_float32_masters_and_moves_as_float32_does() -> None:
    weights, metrics, _, program = one_step(dtype="bf16")
    exact, expected, _, _ = one_step()
    assert metrics[0] == pytest.approx(expected[0], rel=1e-3)
    assert metrics[1] == pytest.approx(expected[1], rel=3e-2)
    assert all(w.dtype == np.float32 for w in weights.values())
    name = "layers.mlp.up.weight"
    start = stacks(ARCHITECTURE)[name].gather(InitialWeights(ARCHITECTURE, 0).tensor)
    moved, meant = weights[name] - start, exact[name] - start
    cosine = (moved * meant).sum() / np.sqrt((moved**2).sum() * (meant**2).sum())
    assert cosine > 0.99
    # A float32 master takes steps far below the spacing of bf16 numbers.
    assert (weights[name] != np.asarray(jnp.asarray(weights[name], jnp.bfloat16))).any()
    matmuls = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    inside = [e for e in matmuls if len(e.invars[0].aval.shape) == 3]
    assert inside
    assert all(v.aval.dtype == jnp.bfloat16 for e in inside for v in e.invars)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_copy_of_a_layers_weights_is_kept_for_the_backward_pass(dtype: str) -> None:
    program = one_step(dtype=dtype)[3]
    shape = stacks(ARCHITECTURE)["layers.mlp.up.weight"].shape
    forward = next(e for e in equations(program.jaxpr) if e.primitive.name == "scan")
    kept = [v.aval.shape for v in forward.outvars]
    assert shape not in kept
    assert (shape[0], shape[2], shape[1]) not in kept


def test_an_fp16_step_that_may_be_skipped_branches_around_no_weights_and_no_state() -> None:
    """XLA for GPUs does not overwrite what goes into a branch: it would copy all of it."""
    plan = replace(Plan(), {"backend": "jax", "optimize.precision": "fp16"})
    update = transformation(plan, ARCHITECTURE)
    weights = {n: jnp.zeros(s.shape) for n, s in stacks(ARCHITECTURE).items()}
    state = TrainState(weights, update.init(weights), jnp.asarray(loss_scale.start()))
    batch = tiny_models.batch(1, ROWS, LENGTH)
    arguments = (state, {}, dict(batch.arrays), np.float32([1.0, 0.0]))
    program = train_step(plan, ARCHITECTURE, update).trace(*arguments).jaxpr
    branches = [e for e in equations(program.jaxpr) if e.primitive.name == "cond"]
    assert max((v.aval.size for e in branches for v in e.outvars), default=0) < 1000
