"""A tiled MLP: the same training, with the MLP's inner activations of one tile at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from memconsole.plan.check import check
from memconsole.plan.models.tiles import LEAST_TOKENS, tile_tokens
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.optimizations import BY_KEY, check_conflicts
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.models.tiles import in_tiles
from memconsole_jax.tasks.language import LANGUAGE
from memconsole_jax.techniques.activations import tiled_mlp as jax_tiles
from memconsole_torch.models import decoder
from memconsole_torch.techniques.activations import tiled_mlp as torch_tiles
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import adapted
from tests.training.harness.grids import spread
from tests.training.harness.jaxprs import equations

torch.set_num_threads(1)
TILE = 24
"""Most tokens of a tile here: a step of 4 x 16 tokens has three, the last one smaller in torch and overlapping in JAX."""
WHOLE = {"optimize.lora_rank": 0, "optimize.freeze_base": False}
TILED = {"optimize.tiled_mlp": True}
CHANGES: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "adapters": {},
    "full": WHOLE | {"optimize.gradient_checkpointing": "full"},
    "attention, bf16": WHOLE
    | {"optimize.gradient_checkpointing": "attention", "optimize.precision": "bf16"},
    "16-bit weights": WHOLE | {"optimize.precision": "bf16-sr"},
    "adapters of attention, codes": {
        "optimize.base_storage": "nf4",
        "optimize.lora_targets": "attention",
    },
    "adapters, codes, full": {
        "optimize.base_storage": "nf4",
        "optimize.gradient_checkpointing": "full",
    },
    "accumulation": WHOLE | {"optimize.accumulation_steps": 2, "train.batch_size": 2},
    "dropout": WHOLE | {"train.dropout": 0.1},
    "offloaded": WHOLE
    | {"optimize.activation_offload": True, "optimize.gradient_checkpointing": "full"},
}
OF_TORCH: dict[str, dict[str, Any]] = {
    "updates inside": WHOLE | {"optimize.optimizer_in_backward": True, "train.grad_clip": 0.0},
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch_tiles, jax_tiles):
        monkeypatch.setattr(module, "tile_tokens", lambda _: TILE)


def losses(backend: str, kind: str, changes: dict[str, Any]) -> list[float]:
    """Those of four steps, and of an evaluation."""
    plan = adapted.plan_with(backend, changes)
    engine = adapted.built(plan, kind)
    for step in range(4):
        engine.train_step(adapted.batch(plan, step))
    evaluated = engine.evaluate([adapted.batch(plan, 9)])
    return [metrics.loss for metrics in engine.take_metrics()] + [evaluated.mean]


def assert_trains_alike(backend: str, kind: str, changes: dict[str, Any]) -> None:
    near = 1e-3 if changes.get("optimize.precision") else 2e-6
    found, expected = (losses(backend, kind, changes | more) for more in (TILED, {}))
    np.testing.assert_allclose(found, expected, rtol=near)


@pytest.mark.parametrize(
    ("backend", "kind", "changes"),
    spread(("torch", "jax"), ("llama", "gpt2", "gpt_neox"), tuple(CHANGES.values())),
)
def test_tiles_train_as_the_whole_mlp_does(
    backend: str, kind: str, changes: dict[str, Any]
) -> None:
    assert_trains_alike(backend, kind, changes)


@pytest.mark.parametrize("changes", OF_TORCH.values(), ids=OF_TORCH)
def test_tiles_train_alike_in_torch(changes: dict[str, Any]) -> None:
    assert_trains_alike("torch", "llama", changes)


class Computed:
    """Counts the tokens of each call of a torch MLP's activation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        plain = decoder.MLP.activation

        def counted(mlp: decoder.MLP, x: torch.Tensor) -> torch.Tensor:
            self.tokens.append(x.shape[:-1].numel())
            return plain(mlp, x)

        monkeypatch.setattr(decoder.MLP, "activation", counted)


@pytest.mark.parametrize("mode", ["none", "attention", "full"])
def test_torch_computes_each_token_twice_and_one_tile_at_a_time(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = WHOLE | TILED | {"optimize.gradient_checkpointing": mode}
    plan = adapted.plan_with("torch", changes)
    engine, counted = adapted.built(plan), Computed(monkeypatch)
    engine.train_step(adapted.batch(plan, 0))
    assert max(counted.tokens) <= TILE
    blocks = adapted.MODELS["llama"].layers
    assert sum(counted.tokens) == 2 * blocks * plan.micro_batch_tokens


@pytest.mark.parametrize("mode", ["none", "full"])
def test_no_array_in_jax_holds_the_inside_of_the_mlp_for_all_tokens(mode: str) -> None:
    a = adapted.MODELS["llama"]

    def widest(changes: dict[str, Any]) -> int:
        """Tokens of the largest array that is as wide as the MLP's inside."""
        loss = LANGUAGE.loss(adapted.plan_with("jax", WHOLE | changes), a)
        arrays = {
            "inputs": jnp.zeros((4, adapted.LENGTH), jnp.int32),
            "targets": jnp.zeros((4, adapted.LENGTH), jnp.int32),
        }
        source = InitialWeights(a, 0)
        weights = {n: jnp.asarray(s.gather(source.tensor)) for n, s in stacks(a).items()}
        jaxpr = jax.make_jaxpr(jax.grad(lambda w: loss(w, {}, arrays)))(weights)
        shapes = [v.aval.shape for e in equations(jaxpr.jaxpr) for v in e.outvars]
        inside = [shape for shape in shapes if len(shape) == 3 and shape[-1] == a.intermediate_size]
        return max(rows * length for rows, length, _ in inside if rows == 4)

    checkpointing = {"optimize.gradient_checkpointing": mode}
    assert widest(checkpointing) == 4 * adapted.LENGTH
    assert widest(checkpointing | TILED) <= TILE


@pytest.mark.parametrize("length", [1, 5, 12, 13, 17])
def test_tiles_of_jax_cover_rows_of_every_length(length: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, length, 3)).astype(np.float32)
    w = rng.standard_normal((3, 3)).astype(np.float32)

    def layer(x: Any, w: Any, rest: Any) -> Any:
        return jnp.tanh(x @ w) * rest

    def summed(compute: Any) -> Any:
        return jax.grad(lambda x, w: jnp.sum(compute(x, w) ** 2), argnums=(0, 1))

    tiled = summed(lambda x, w: in_tiles(layer, 8, x, w, 3.0))(x, w)
    for found, expected in zip(tiled, summed(lambda x, w: layer(x, w, 3.0))(x, w), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(in_tiles(layer, 8, x, w, 3.0), layer(x, w, 3.0), rtol=1e-5)


def test_a_tile_has_as_many_tokens_as_the_stream_is_wide() -> None:
    assert tile_tokens(64) == LEAST_TOKENS == 1024
    assert tile_tokens(4096) == 4096


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimize.gradient_checkpointing": "selective"}, "selective checkpointing keeps"),
        ({"optimize.compile": True}, "tiles are not compiled"),
        ({"optimize.lora_rank": 8, "optimize.lora_dropout": 0.1}, "would drop the same inputs"),
        ({"backend": "jax", "device.count": 2}, "exchange the gradients of every tile"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_tiled_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        check_conflicts(replace(Plan(), changes | TILED))


def test_adapters_of_attention_may_drop_beside_tiles() -> None:
    dropping = {"optimize.lora_rank": 8, "optimize.lora_dropout": 0.1}
    check_conflicts(replace(Plan(), dropping | TILED | {"optimize.lora_targets": "attention"}))


def test_the_row_says_when_tiles_change_nothing() -> None:
    row = BY_KEY["optimize.tiled_mlp"]
    assert row.saves_nothing is not None
    assert row.says is not None
    few = replace(Plan(), TILED | {"train.batch_size": 2})
    assert row.saves_nothing(few, "cpu") == "a micro-batch has 256 tokens, and a tile up to 1,024"
    assert "changes nothing" in (row.says(few, "cpu") or "")
    assert row.saves_nothing(replace(Plan(), TILED), "cpu") is None
    experts = replace(Plan(), TILED | {"model.name": "olmoe-1b-7b", "train.batch_size": 64})
    assert "experts" in (row.saves_nothing(experts, "cpu") or "")


@pytest.mark.parametrize("name", ["lqr", "efficientids"])
def test_other_tasks_refuse_tiles(name: str) -> None:
    from memconsole.plan import catalog

    plan = replace(catalog.presets()[name].plan if name in catalog.presets() else Plan(), TILED)
    with pytest.raises(PlanError, match=r"tiled_mlp"):
        check(replace(plan, {"model.name": name}))
