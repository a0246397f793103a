"""Mixtures of experts in JAX: transformers' gradients, and memory and work that are those of the picked experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import torch

from memconsole.memory.activations import jax_experts
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Parameter
from memconsole_jax import target
from memconsole_jax.layout.stacking import Stack
from memconsole_jax.models import experts
from memconsole_jax.models.experts import Experts
from memconsole_jax.techniques.activations import checkpointing
from memconsole_jax.techniques.activations.activation_offload import Disk
from memconsole_jax.techniques.weights.quantized_base import QuantizedLinear, decoded, gathered
from memconsole_trainer.randomness import generator
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from tests.training.harness import jax_comparison as comparison
from tests.training.harness import tiny_models
from tests.training.harness.jaxprs import equations

KINDS = ("mixtral", "qwen3_moe", "olmoe", "granite_moe")
MODEL = tiny_models.ARCHITECTURES["qwen3_moe"]
"""8 experts, of which a token goes to 3, with normalized shares."""
C, F = MODEL.hidden_size, MODEL.intermediate_size


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    oracle = tiny_models.save(kind, tmp_path / "weights")
    architecture = tiny_models.ARCHITECTURES[kind]
    weights = HuggingFaceWeights(tmp_path / "weights", architecture)
    batch = tiny_models.batch(1, 3, 40)
    found = comparison.gradients(architecture, weights, batch)
    inputs, targets = (torch.from_numpy(batch[n][0]).long() for n in ("inputs", "targets"))
    logits = oracle(input_ids=inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.grad)
    oracle.save_pretrained(tmp_path / "gradients")
    expected = HuggingFaceWeights(tmp_path / "gradients", architecture)
    for name, gradient in found.items():
        wanted = np.asarray(expected.tensor(name), np.float32)
        first = 1 if name == "embedding.weight" else 0  # torch learns no embedding of padding
        error = (
            np.abs(np.asarray(gradient, np.float32) - wanted)[first:].max() / np.abs(wanted).max()
        )
        assert error <= 1e-4, name


def arrays(a: Architecture = MODEL, scale: float = 0.3) -> dict[str, np.ndarray]:
    shapes = {
        "router": (a.experts, a.hidden_size),
        "gate": (a.experts * a.intermediate_size, a.hidden_size),
        "up": (a.experts * a.intermediate_size, a.hidden_size),
        "down": (a.experts * a.hidden_size, a.intermediate_size),
    }
    return {
        name: np.float32(scale) * generator(1, name).standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def mixture(weights: dict[str, Any], a: Architecture = MODEL) -> Experts:
    found = Experts(a)
    for name, array in weights.items():
        getattr(found, name).weight[...] = array
    return found


def rows(tokens: int = 21, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, tokens, C)), jnp.float32)


def expected(weights: dict[str, Any], x: jax.Array, a: Architecture = MODEL) -> jax.Array:
    """The mixture by its definition: every expert for every token, those not picked with a share of 0."""
    shares = jax.nn.softmax(x @ weights["router"].T, axis=-1)
    least = jax.lax.top_k(shares, a.experts_per_token)[0][..., -1:]
    shares = jnp.where(shares >= least, shares, 0)
    if a.normalized_shares:
        shares = shares / shares.sum(-1, keepdims=True)
    gate, up, down = (
        weights[n].reshape(a.experts, -1, weights[n].shape[1]) for n in ("gate", "up", "down")
    )
    inner = jax.nn.silu(jnp.einsum("btc,efc->btef", x, gate)) * jnp.einsum("btc,efc->btef", x, up)
    return jnp.einsum("bte,btef,ecf->btc", shares, inner, down)


def loss(make: Any, x: Any, weights: Any) -> Any:
    return jnp.sum(jnp.sin(make(weights, x)))


def ours(weights: Any, x: Any) -> Any:
    return mixture(weights)(x)


@pytest.mark.parametrize("fewest", [1, 64])
def test_tiles_give_the_mixture_and_the_gradients_of_its_definition(
    fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many tiles of an expert, and with one."""
    monkeypatch.setattr(experts, "FEWEST_ROWS", fewest)
    monkeypatch.setattr(experts, "CPU_MOST_ROWS", max(4, fewest))
    weights, x = arrays(), rows()
    np.testing.assert_allclose(ours(weights, x), expected(weights, x), atol=2e-5)
    found, wanted = (
        jax.jit(jax.grad(lambda *both, make=make: loss(make, *both), argnums=(0, 1)))(x, weights)
        for make in (ours, expected)
    )
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, rtol=1e-5, atol=1e-4), found, wanted)


def test_an_expert_without_tokens_gets_no_gradient_and_the_others_theirs() -> None:
    weights, x = arrays(), rows()
    x = x.at[..., 0].set(1.0)
    weights["router"][5, :] = 0
    weights["router"][5, 0] = -1000.0  # no token picks it
    found = jax.jit(jax.grad(lambda w: loss(ours, x, w)))(weights)
    wanted = jax.grad(lambda w: loss(expected, x, w))(weights)
    for name in ("gate", "up", "down"):
        each = np.asarray(found[name]).reshape(MODEL.experts, -1)
        assert (each[5] == 0).all()
        assert (np.delete(each, 5, 0) != 0).any(axis=1).all()
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)


def test_16_bit_products_are_close_to_those_in_fp32() -> None:
    weights, x = arrays(), rows()
    found = jax.jit(ours)(weights, x.astype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    wanted = np.asarray(ours(weights, x.astype(jnp.bfloat16).astype(jnp.float32)))
    apart = np.abs(np.asarray(found, np.float32) - wanted).max(-1) / np.abs(wanted).max()
    # A token whose experts are nearly equal may go to another one.
    assert np.mean(apart < 0.03) > 0.95


def stored(name: str, weight: np.ndarray, storage: Any) -> tuple[Any, Any]:
    """The codes and scales of one matrix."""
    stack = Stack(name, (Parameter(name, weight.shape, "experts", 0),), True)
    return tuple(array[0] for array in gathered(stack, storage, lambda _: weight).values())


@pytest.mark.parametrize("storage", ["int8", "nf4"])
@pytest.mark.parametrize("inner", [F, 50, 64], ids=["crossing", "inside", "whole"])
def test_codes_of_one_expert_are_decoded_as_those_of_all(storage: Any, inner: int) -> None:
    """Where blocks of codes cross rows, begin inside an expert, and are whole."""
    a = msgspec.structs.replace(MODEL, intermediate_size=inner)
    weights, x = arrays(a), rows()
    coded, plain = mixture(weights, a), dict(weights)
    for name in ("gate", "up", "down"):
        codes, scales = stored(name, weights[name], storage)
        layer = getattr(coded, name)
        layer.weight = layer.weight.__class__(jnp.asarray(codes))
        setattr(coded, name, QuantizedLinear(layer, jnp.asarray(scales), weights[name].shape))
        plain[name] = decoded(jnp.asarray(codes), jnp.asarray(scales), weights[name].shape)

    def by_x(make: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(make(x)))))(x)

    found, wanted = by_x(coded), by_x(mixture(plain, a))
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, atol=1e-5), found, wanted)


def products(function: Any, *arguments: Any) -> int:
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return sum(e.primitive.name == "dot_general" for e in equations(jaxpr.jaxpr))


@pytest.mark.parametrize("wrap", [checkpointing.none, Disk().offloaded], ids=["", "offloaded"])
def test_frozen_experts_take_no_products_for_their_gradients(wrap: Any) -> None:
    weights, x = arrays(), rows()
    block = wrap(lambda x, weights: ours(weights, x))

    def learned(trained: Any) -> Any:
        return jnp.sum(jnp.sin(block(x, weights | trained)))

    counts = [products(jax.grad(learned), w) for w in (weights, {"router": weights["router"]})]
    assert counts[0] - counts[1] == 3


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 0), ("full", 3)])
def test_a_checkpointed_block_computes_again_what_its_mode_does_not_keep(
    mode: str, again: int
) -> None:
    """`selective` keeps the outputs of router, gate and up. `full` keeps none of them. What `down` makes is never computed
    again."""
    weights, x = arrays(), rows()

    def step(block: Any, weights: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x + block(weights, jnp.tanh(x))))

    wrapped = getattr(checkpointing, mode)(ours)
    counts = [products(jax.grad(partial(step, block)), weights, x) for block in (wrapped, ours)]
    assert counts[0] - counts[1] == again


@pytest.mark.parametrize("tokens", [1, 5, 300, 4096, 100_000])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_formula_has_the_tiles_of_the_engine(
    tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "kind", lambda: kind)
    form = experts._Settings(MODEL.experts, MODEL.experts_per_token, F, True, "silu", ())
    assert form.tile(tokens) == jax_experts.tile_rows(MODEL, tokens, kind)
