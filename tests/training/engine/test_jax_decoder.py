"""The JAX decoder gives transformers' logits, and its program has the size and the arrays it promises."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.test_util import check_grads

from memconsole.memory.activations import jax_chunks
from memconsole.memory.estimate import model_of
from memconsole.memory.state.sizes import sizes
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan, replace
from memconsole_jax import target
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.models import attention
from memconsole_jax.models.attention import causal_attention, chunk_sizes
from memconsole_jax.models.decoder import assemble
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import jax_comparison as comparison
from tests.training.harness import tiny_models
from tests.training.harness.jaxprs import equations


@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_a_saved_hugging_face_model_gives_transformers_logits(kind: str, tmp_path: Path) -> None:
    import torch

    oracle = tiny_models.save(kind, tmp_path, "20KB")
    architecture = tiny_models.ARCHITECTURES[kind]
    weights = HuggingFaceWeights(tmp_path, architecture)
    # Longer and shorter than the rows of pretraining that scaled models name.
    for length in (40, 24) if architecture.rope_scaling else (40,):
        tokens = tiny_models.tokens(length=length)
        found = comparison.logits(architecture, weights, tokens)
        with torch.no_grad():
            expected = oracle(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
        assert np.abs(found - expected).max() / np.abs(expected).max() <= 1e-4


def with_extras() -> Architecture:
    return msgspec.structs.replace(
        tiny_models.ARCHITECTURES["gpt2"], auxiliary_rows=10, diagnostic_classes=4
    )


@pytest.mark.parametrize("kind", [*tiny_models.ARCHITECTURES, "extras"])
def test_stacked_arrays_are_the_canonical_parameters_and_nothing_else(kind: str) -> None:
    architecture = with_extras() if kind == "extras" else tiny_models.ARCHITECTURES[kind]
    source = InitialWeights(architecture, 3)
    found = {}
    count = 0
    weights = {}
    for name, stack in stacks(architecture).items():
        array = stack.gather(source.tensor)
        assert array.shape == stack.shape
        weights[name] = jnp.asarray(array)
        count += array.size
        found.update(stack.split(array))
    assert count == sizes(architecture).total
    assert sorted(found) == sorted(p.name for p in parameters(architecture))
    for parameter in parameters(architecture):
        np.testing.assert_array_equal(found[parameter.name], source.tensor(parameter.name))
    assemble(architecture, weights)  # raises KeyError for a module parameter that has no stack


def gradient_program(architecture: Architecture) -> Any:
    weights = {
        n: jax.ShapeDtypeStruct(s.shape, jnp.float32) for n, s in stacks(architecture).items()
    }

    def loss(weights: Any, tokens: Any) -> Any:
        return jnp.sum(assemble(architecture, weights)(tokens))

    tokens = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    return jax.jit(jax.grad(loss)).trace(weights, tokens)


@pytest.mark.parametrize("kind", ["gpt2", "gemma3"])
def test_the_program_does_not_grow_with_depth(kind: str) -> None:
    sizes = []
    for layers in (3, 24):
        architecture = msgspec.structs.replace(tiny_models.ARCHITECTURES[kind], layers=layers)
        program = gradient_program(architecture)
        text = program.lower().as_text()
        sizes.append((sum(1 for _ in equations(program.jaxpr.jaxpr)), text.count("\n")))
    assert sizes[0] == sizes[1]


def dense(q: Any, k: Any, v: Any, scale: float, window: int) -> Any:
    """Attention by its definition, in float64."""
    _, t, h, _ = q.shape
    out = np.zeros(q.shape)
    groups = h // k.shape[2]
    for head in range(h):
        key, value = k[:, :, head // groups], v[:, :, head // groups]
        for i in range(t):
            first = max(0, i - window + 1)
            scores = np.einsum("bd,bsd->bs", q[:, i, head], key[:, first : i + 1]) * scale
            share = np.exp(scores - scores.max(-1, keepdims=True))
            share /= share.sum(-1, keepdims=True)
            out[:, i, head] = np.einsum("bs,bsd->bd", share, value[:, first : i + 1])
    return out


@pytest.mark.parametrize("window", [None, 5])
def test_attention_in_chunks_is_attention_by_definition(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CPU_SCORE_BYTES", 0)
    monkeypatch.setattr(attention, "CPU_ROWS_BYTES", 0)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 7)
    random = np.random.default_rng(0)
    q = random.normal(size=(2, 23, 4, 8)).astype(np.float32)
    k, v = random.normal(size=(2, 2, 23, 2, 8)).astype(np.float32)
    assert chunk_sizes(2, 4, 23) == (1, 6)  # 4 chunks, the last one filled up
    found = causal_attention(q, k, v, 0.3, None if window is None else jnp.int32(window))
    expected = dense(q, k, v, 0.3, window or 23).reshape(2, 23, 32)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_gradients_of_chunked_attention_are_those_of_one_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(0)
    q = random.normal(size=(2, 23, 4, 8)).astype(np.float32)
    k, v = random.normal(size=(2, 2, 23, 2, 8)).astype(np.float32)

    def gradients() -> Any:
        def loss(*x: Any) -> Any:
            return jnp.sum(jnp.sin(causal_attention(*x, 0.3, jnp.int32(9))))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    whole = gradients()
    monkeypatch.setattr(attention, "CPU_SCORE_BYTES", 0)
    monkeypatch.setattr(attention, "CPU_ROWS_BYTES", 0)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 7)
    for chunked, expected in zip(gradients(), whole, strict=True):
        np.testing.assert_allclose(chunked, expected, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        {"cap": 2.0},
        {"drop": (np.array([1, 2], np.uint32), 0.4)},
        {"documents": np.array([[0] * 5 + [1] * 4, [2] * 9], np.int32), "cap": 2.0},
    ],
    ids=str,
)
def test_gradients_of_attention_are_those_of_finite_differences(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CPU_SCORE_BYTES", 0)
    monkeypatch.setattr(attention, "CPU_ROWS_BYTES", 0)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 4)
    random = np.random.default_rng(0)
    q = random.normal(size=(2, 9, 4, 4)).astype(np.float32)
    k, v = random.normal(size=(2, 2, 9, 2, 4)).astype(np.float32)
    assert chunk_sizes(2, 4, 9) == (1, 3)

    def loss(*x: Any) -> Any:
        return jnp.sum(jnp.sin(causal_attention(*x, 0.5, None, **more)))

    check_grads(loss, (q, k, v), order=1, modes=["rev"], atol=0.02, rtol=0.02, eps=1e-2)


def test_sums_over_chunks_of_16_bits_keep_small_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values get the same small gradient from each of 256 chunks."""
    monkeypatch.setattr(attention, "CPU_SCORE_BYTES", 0)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 1)
    monkeypatch.setattr(attention, "CPU_QUERIES", 1)
    ones = jnp.ones((1, 512, 1, 8), jnp.bfloat16)

    def loss(v: Any) -> Any:
        return jnp.sum(causal_attention(ones, ones, v, 0.0, None).astype(jnp.float32))

    first = float(jax.grad(loss)(ones)[0, 0, 0, 0])
    assert first == pytest.approx(sum(1 / n for n in range(1, 513)), rel=0.01)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
def test_what_memory_counts_is_what_attention_computes(kind: str) -> None:
    for rows, length in ((1, 8), (3, 64), (16, 256), (12, 1000), (7, 4096)):
        changes = {"data.sequence_length": length, "train.batch_size": rows, "backend": "jax"}
        plan = replace(Plan(), changes | {"model.name": "gpt2", "optimize.precision": "fp32"})
        a = msgspec.structs.replace(model_of(plan), max_positions=4096)
        with target.absent(kind) if kind != "cpu" else nullcontext():
            of_batch, queries = chunk_sizes(rows, a.heads, length)
        counted = jax_chunks.score_bytes(step_of(plan, a, kind), rows)
        assert counted == 4 * of_batch * a.heads * queries * length


def test_no_square_of_scores_outlives_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass holds scores of all queries: the widest has one chunk's rows."""
    monkeypatch.setattr(attention, "CPU_SCORE_BYTES", 0)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 8)
    t = 32
    q = jax.ShapeDtypeStruct((1, t, 4, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((1, t, 2, 8), jnp.float32)
    program = jax.make_jaxpr(
        jax.grad(lambda *x: jnp.sum(causal_attention(*x, 0.3, None)), argnums=(0, 1, 2))
    )(q, k, k)
    shapes = [v.aval.shape for e in equations(program.jaxpr) for v in e.outvars]
    scores = [s for s in shapes if len(s) >= 4 and s[-1] == t and np.prod(s) > 8 * 4 * t]
    assert any(s[-2:] == (8, t) for s in shapes)
    assert not scores


def test_a_short_sequence_needs_no_window_but_keeps_its_local_rotation() -> None:
    """Within the window a local layer differs from a global one by its rotary base only."""
    architecture = tiny_models.ARCHITECTURES["gemma3"]
    weights = InitialWeights(architecture, 0)
    tokens = tiny_models.tokens(length=5)
    wide = msgspec.structs.replace(architecture, sliding_window=100)
    one_base = msgspec.structs.replace(wide, rope_local_theta=wide.rope_theta)
    found = [comparison.logits(a, weights, tokens) for a in (architecture, wide, one_base)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert np.abs(found[1] - found[2]).max() > 1e-5
