"""What the JAX engine's backward pass waits for is there once, and no sooner than it is needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from memconsole.memory.activations.jax_block import jax_block
from memconsole.plan.plan import Checkpointing, Plan, replace
from memconsole_jax import target
from memconsole_jax.compiled.programs import Programs
from memconsole_jax.compiled.step import mean_gradients
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.models import attention
from memconsole_jax.models.layers import Norm, lookup, product
from memconsole_jax.tasks.language import LANGUAGE, summed_nats
from memconsole_jax.techniques.activations.fused_loss import MASKED, whole
from memconsole_jax.techniques.optimizer.optimizers import transformation
from tests.training.harness import tiny_models

RANDOM = np.random.default_rng(0)


def test_looking_rows_up_has_the_gradient_of_indexing() -> None:
    table = RANDOM.normal(size=(11, 5)).astype(np.float32)
    indices = np.array([[3, 3, 0], [10, 3, 7]])
    weights = RANDOM.normal(size=(2, 3, 5)).astype(np.float32)
    found = jax.grad(lambda t: jnp.sum(lookup(t, indices) ** 2 * weights))(table)
    expected = jax.grad(lambda t: jnp.sum(t[indices] ** 2 * weights))(table)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.abs(found[3]).max() > 0
    assert np.abs(found[1]).max() == 0


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_padded_head_changes_neither_the_loss_nor_its_gradients(cap: float | None) -> None:
    hidden = RANDOM.normal(size=(2, 3, 4)).astype(np.float32)
    head = RANDOM.normal(size=(37, 4)).astype(np.float32)  # no multiple of 16
    targets = np.array([[36, 0, MASKED], [5, 36, 12]])

    def loss(*x: Any) -> Any:
        def nats(h: Any, w: Any) -> Any:
            return whole(h, w, targets, 1.0, None, cap)

        return jax.value_and_grad(nats, argnums=(0, 1))(*x)

    expected = loss(hidden, head)
    with target.absent("gpu"):
        widths = {v.aval.shape[-1:] for v in _values(jax.make_jaxpr(loss)(hidden, head).jaxpr)}
        found = loss(hidden, head)
    assert (48,) in widths  # it was padded
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)


def test_the_output_of_fused_attention_is_kept_in_one_shape_only() -> None:
    """Joined heads beside split ones would be a second copy of every layer's."""
    architecture = tiny_models.ARCHITECTURES["llama"]
    plan = replace(
        Plan(),
        {
            "backend": "jax",
            "train.batch_size": 3,
            "data.sequence_length": 24,
            "optimize.precision": "bf16",
        },
    )
    a, (b, t) = architecture, (3, 24)
    with target.absent("gpu"):
        programs = Programs.of(plan, a, "gpu", jax.devices()[0])
        loss = LANGUAGE.loss(plan, a)
        rows = programs.arrays(b)
        program = jax.make_jaxpr(jax.grad(loss))(programs.trained_shapes, {}, rows)
    forward = next(
        e for e in program.jaxpr.eqns if e.primitive.name == "scan" and not e.params["reverse"]
    )
    stacked = [v.aval.shape for v in forward.outvars]
    assert (a.layers, b, t, a.heads, a.head_size) in stacked
    assert a.query_width != a.hidden_size
    assert (a.layers, b, t, a.query_width) not in stacked


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("mode", ["none", "selective", "attention", "full"])
def test_a_block_keeps_the_bytes_that_the_formula_lists(mode: str, parallel: bool) -> None:
    a = msgspec.structs.replace(
        tiny_models.ARCHITECTURES["gpt_neox"], layers=5, parallel_residual=parallel
    )
    changes = {
        "backend": "jax",
        "train.batch_size": 3,
        "data.sequence_length": 64,
        "optimize.gradient_checkpointing": mode,
    }
    plan = replace(Plan(), changes)
    programs = Programs.of(plan, a, "cpu", jax.devices()[0])
    loss = LANGUAGE.loss(plan, a)
    program = jax.make_jaxpr(jax.grad(loss))(programs.trained_shapes, {}, programs.arrays(3))
    forward = next(
        e for e in program.jaxpr.eqns if e.primitive.name == "scan" and not e.params["reverse"]
    )
    stacked = [v.aval for v in forward.outvars if v.aval.shape[:2] == (5, 3)]
    kept = sum(v.size * v.dtype.itemsize for v in stacked)
    assert kept == 5 * 3 * 64 * jax_block(a, "fp32", mode, "cpu", 0).kept


@pytest.mark.parametrize("rows", [1, 4])
def test_logits_become_their_own_gradient(rows: int) -> None:
    hidden, head = (jax.ShapeDtypeStruct(s, np.float32) for s in ((rows, 256, 16), (4096, 16)))
    targets = jax.ShapeDtypeStruct((rows, 256), np.int32)
    program = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))
    logits = 4 * rows * 256 * 4096
    assert logits <= temporaries(program.lower(hidden, head, targets)) < 1.2 * logits


@pytest.mark.parametrize("tied", [False, True])
def test_the_sum_of_the_heads_gradients_is_held_once(tied: bool) -> None:
    """With micro-batches it is held beside the gradient of one micro-batch."""
    head = 4 * 4096 * tiny_models.ARCHITECTURES["llama"].hidden_size
    shape: dict[str, Any] = {"vocab_size": 4096, "intermediate_size": 512, "tied_embeddings": tied}
    long = {"data.sequence_length": 256}
    one, several = (gradient_bytes(long, (steps, 1), **shape) for steps in (1, 4))
    assert several - one < 1.2 * head


def test_scores_are_not_there_while_the_mlp_runs_backwards() -> None:
    """A block that is run again whole makes its scores twice: for its output, and for their own gradients."""
    length = 256
    full = {"optimize.gradient_checkpointing": "full", "data.sequence_length": length}
    scores = 4 * 4 * length * length
    few, many = (
        gradient_bytes(full, (1, 1), heads=heads, kv_heads=1, head_size=8, intermediate_size=4096)
        for heads in (1, 4)
    )
    assert many - few < 0.5 * scores


@pytest.mark.parametrize(("chunked", "heads"), [(False, 1.5), (True, 0.5)])
def test_a_narrowed_head_is_not_kept_for_all_micro_batches(chunked: bool, heads: float) -> None:
    """From full logits the gradient of the head is there once."""
    head = 4 * 4096 * tiny_models.ARCHITECTURES["llama"].hidden_size
    plan = {
        "data.sequence_length": 256,
        "optimize.precision": "bf16",
        "optimize.gradient_checkpointing": "full",
        "optimize.fused_loss": chunked,
    }
    small, large = (
        gradient_bytes(plan, (4, 1), vocab_size=rows, intermediate_size=8192) for rows in (64, 4096)
    )
    assert large - small < heads * head


def test_the_gradient_of_a_bias_widens_nothing_again() -> None:
    """XLA on a CPU computes 16-bit products in float32."""
    shapes = ((4, 64, 16), jnp.bfloat16), ((1024, 16), np.float32), ((1024,), np.float32)
    x, weight, bias = (jax.ShapeDtypeStruct(shape, np.dtype(kind)) for shape, kind in shapes)
    gradient = jax.ShapeDtypeStruct((4, 64, 1024), jnp.bfloat16)

    def back(gradient: Any, *arrays: Any) -> Any:
        return jax.vjp(product, *arrays)[1](gradient)

    with_bias, without = (
        temporaries(jax.jit(back).lower(gradient, *arrays))
        for arrays in ((x, weight, bias), (x, weight))
    )
    assert with_bias - without < 0.5 * (4 * 4 * 64 * 1024)


def test_what_norms_compute_is_not_there_while_the_mlp_runs_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = {"optimize.gradient_checkpointing": "full", "data.sequence_length": 1024}
    shape: dict[str, Any] = {"hidden_size": 256, "heads": 1, "kv_heads": 1, "head_size": 8}
    normed = gradient_bytes(full, (1, 1), intermediate_size=1024, **shape)
    monkeypatch.setattr(Norm, "__call__", lambda self, x: x * self.weight[...])
    scaled = gradient_bytes(full, (1, 1), intermediate_size=1024, **shape)
    assert normed - scaled < 4 * 1024 * 256  # one residual stream


def test_adafactor_makes_the_update_of_a_layer_at_a_time() -> None:
    a = msgspec.structs.replace(tiny_models.ARCHITECTURES["llama"], layers=64)
    plan = replace(Plan(), {"backend": "jax", "optimize.optimizer": "adafactor"})
    weights = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in stacks(a).items()}
    rule = transformation(plan, a)
    state = jax.eval_shape(rule.init, weights)
    program = jax.jit(rule.update, donate_argnums=(0, 1))
    blocks = sum(4 * w.size for n, w in weights.items() if n.startswith("layers."))
    assert temporaries(program.lower(weights, state, weights)) < blocks / 4


def test_attention_keeps_its_inputs_its_output_and_one_number_per_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "CPU_SCORE_BYTES", 1)
    a, (b, t) = tiny_models.ARCHITECTURES["llama"], (2, 2 * attention.FEWEST_QUERIES)
    query, key = (
        jnp.ones((b, t, heads, a.head_size), jnp.float32) for heads in (a.heads, a.kv_heads)
    )
    _, pull = jax.vjp(lambda *x: attention.causal_attention(*x, 1.0, None), query, key, key)
    kept = sum(x.nbytes for x in jax.tree.leaves(pull))
    assert kept == 2 * query.nbytes + 2 * key.nbytes + 4 * b * t * a.heads


@pytest.mark.parametrize("mode", ["none", "selective", "attention", "full"])
def test_no_checkpointing_keeps_scores(mode: Checkpointing) -> None:
    a, (b, t) = tiny_models.ARCHITECTURES["gemma3"], (3, 24)
    plan = replace(Plan(), {"backend": "jax", "optimize.gradient_checkpointing": mode})
    trained = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in stacks(a).items()}
    rows = jax.ShapeDtypeStruct((b, t), np.int32)
    loss = LANGUAGE.loss(plan, a)
    program = jax.make_jaxpr(jax.grad(loss))(trained, {}, {"inputs": rows, "targets": rows})
    forward = next(
        e for e in program.jaxpr.eqns if e.primitive.name == "scan" and not e.params["reverse"]
    )
    stacked = [v.aval.shape for v in forward.outvars if v.aval.shape[:1] == (a.layers,)]
    assert (a.layers, b, t, a.hidden_size) in stacked
    if mode in ("attention", "full"):
        assert ((a.layers, b, t, a.query_width) in stacked) == (mode == "attention")
    assert not [shape for shape in stacked if shape[-2:] == (t, t)]
    matmuls = [shape for shape in stacked if shape == (a.layers, b, t, a.intermediate_size)]
    assert len(matmuls) == {"none": 3, "selective": 2, "attention": 0, "full": 0}[mode]


def gradient_bytes(changes: dict[str, Any], cut: tuple[int, int], **shape: Any) -> int:
    """Temporary bytes of the gradients of rows `cut` into micro-batches, of a Llama of a `shape`."""
    a = msgspec.structs.replace(tiny_models.ARCHITECTURES["llama"], **shape)
    plan = replace(
        Plan(),
        {"backend": "jax", "optimize.fused_loss": True, "data.sequence_length": 64, **changes},
    )
    trained = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in stacks(a).items()}
    rows = jax.ShapeDtypeStruct((*cut, plan.data.sequence_length), np.int32)
    loss = summed_nats(plan, a, chunked=plan.optimize.fused_loss)
    arrays = {"inputs": rows, "targets": rows}
    program = jax.jit(lambda *x: mean_gradients(LANGUAGE, loss, *x))
    return temporaries(program.lower(trained, {}, arrays))


def temporaries(lowered: Any) -> int:
    found: int = lowered.compile().memory_analysis().temp_size_in_bytes
    return found


def _values(jaxpr: Any) -> list[Any]:
    return [v for e in jaxpr.eqns for v in e.outvars]
