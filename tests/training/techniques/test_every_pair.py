"""Every two settings of the optimizations together: refused with a reason, or trained as a plain plan trains."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from memconsole.plan.models.architecture import parameters
from memconsole.plan.toggles.optimization import Reach
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole_jax import engine as jax_engine
from memconsole_jax.techniques.activations import tiled_mlp as jax_tiles
from memconsole_torch import engine as torch_engine
from memconsole_torch.techniques.activations import tiled_mlp as torch_tiles
from memconsole_trainer.randomness import generator
from memconsole_trainer.techniques.blockwise import SMALLEST
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models
from tests.training.harness.adapted import State
from tests.training.harness.pairs import (
    ADAPTERS,
    ROWS,
    covering,
    plan_of,
    refusal,
    rows,
)

torch.set_num_threads(1)
BACKENDS = ("torch", "jax")
MODEL = msgspec.structs.replace(
    tiny_models.ARCHITECTURES["qwen3"], layers=2, hidden_size=64, intermediate_size=96
)
"""Large enough for every matrix of a block, but a key's or value's, and its adapters to have 8-bit state."""
NUMBERS = (
    "optimize.precision",
    "optimize.optimizer",
    "optimize.lora_rank",
    "optimize.base_storage",
    "data.isolate_documents",
)
"""The rows that decide what a plan computes; the others decide how."""
COMPRESSED = ROWS["optimize.optimizer_offload"].index({"optimize.optimizer_offload": "compressed"})
ROUNDED_LOSS = {"fp32": 1e-4, "fp16": 1e-4, "bf16": 2e-4, "bf16-sr": 2e-4}
"""How far apart two losses near 5 may be, each the mean of some hundred whose logits the precision rounded differently
(in fp32: whose state was compressed). A step of Adafactor on adapters that begin at zero is not much larger."""
SAMPLED = {"torch": 6, "jax": 2}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the MLP that are smaller than a micro-batch."""
    for module in (torch_tiles, jax_tiles):
        monkeypatch.setattr(module, "tile_tokens", lambda _: 24)


class Noisy:
    """A model whose every tensor is far from zero."""

    def tensor(self, name: str) -> np.ndarray:
        array = InitialWeights(MODEL, 3).tensor(name)
        noise = generator(9, name).standard_normal(array.shape, dtype=np.float32)
        return array + np.float32(0.1) * noise


class Taken(NamedTuple):
    """What came of a step, another, and a third on the first one's rows."""

    losses: list[float]
    norms: list[float]
    update: np.ndarray
    """Of all trained weights, by the three."""


def weights(engine: Any) -> np.ndarray:
    """Those that train, one after another in fp32."""
    found = sorted((n, x) for n, x in State(engine).tensors.items() if n.startswith("model."))
    return np.concatenate([x.astype(np.float32).ravel() for _, x in found])


def taken(backend: str, choices: dict[str, int]) -> Taken:
    """Three steps of the plan with these settings, which are finite."""
    plan = plan_of(backend, choices)
    module: Any = torch_engine if backend == "torch" else jax_engine
    engine = module.create(plan, None)
    engine.build(plan, MODEL, 20, Noisy())
    before = weights(engine)
    for step in (0, 1, 0):
        engine.train_step(rows(plan, step))
    metrics = engine.take_metrics()
    found = Taken(
        [m.loss for m in metrics], [m.gradient_norm for m in metrics], weights(engine) - before
    )
    assert np.isfinite([*found.losses, *found.norms]).all(), choices
    return found


@cache
def plain(backend: str, numbers: tuple[int, ...]) -> Taken:
    """The same three of a plan that has nothing but what decides its numbers."""
    return taken(backend, dict.fromkeys(ROWS, 0) | dict(zip(NUMBERS, numbers, strict=True)))


def test_every_optimization_of_a_step_that_is_trained_is_among_the_rows() -> None:
    of_a_step = (Reach.STEP, Reach.UPDATE)
    apart = {"optimize.sharding"}  # of several processes: tests/training/scale
    assert {r.key for r in OPTIMIZATIONS if r.reach in of_a_step} <= set(ROWS) | apart


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pair_that_no_plan_holds_is_refused_with_a_reason(backend: str) -> None:
    held, refused = covering(backend)
    assert len(held) > 20
    assert len(refused) > 10
    for pair in refused:
        for rank in (0, 1):
            alone = dict.fromkeys(ROWS, 0) | {"optimize.lora_rank": rank} | dict(pair)
            assert len(refusal(backend, alone)) > 20, pair


@pytest.fixture
def real(moving: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """State really moves. Blocks are compiled to a graph, but not to machine code, which takes a minute each."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda m: compiled(m, backend="aot_eager"))


def assert_trains_as_plain(backend: str, choices: dict[str, int]) -> None:
    expected = plain(backend, tuple(choices[key] for key in NUMBERS))
    assert expected.losses[2] < expected.losses[0] - 1e-4
    assert np.linalg.norm(expected.update) > 0.01
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = taken(backend, choices)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(graphs) == bool(choices["optimize.compile"]), choices
    rounded = choices["optimize.precision"] or choices["optimize.optimizer_offload"] == COMPRESSED
    near = 1e-3 if rounded else 1e-5
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=near), choices
    assert found.norms[0] == pytest.approx(expected.norms[0], rel=near), choices
    fallen, fall = (t.losses[0] - t.losses[2] for t in (found, expected))
    differing = ROUNDED_LOSS[plan_of(backend, choices).optimize.precision] if rounded else 0
    assert fallen == pytest.approx(fall, rel=0.02, abs=differing), choices
    apart = np.linalg.norm(found.update - expected.update) / np.linalg.norm(expected.update)
    # Small gradients, of which AdamW and Lion take little but the sign, are rounded to another.
    assert apart < (0.2 if rounded else 0.01), choices


def test_every_weight_that_trains_in_a_block_has_eight_bit_state() -> None:
    assert MODEL.hidden_size * ADAPTERS["optimize.lora_rank"] >= SMALLEST
    large = [p for p in parameters(MODEL) if p.role == "matrix" and p.size >= SMALLEST]
    assert len(large) == 5 * MODEL.layers


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_other_pair_trains_as_a_plain_plan_does(backend: str, real: None) -> None:
    for choices in covering(backend)[0]:
        assert_trains_as_plain(backend, choices)


def assert_both_compute_the_same(numbers: tuple[int, ...]) -> None:
    """What plans of one backend are compared with is here compared with the other's."""
    ours, theirs = (plain(backend, numbers) for backend in BACKENDS)
    narrow = bool(numbers[NUMBERS.index("optimize.precision")])
    near = 5e-3 if narrow else 1e-5
    assert ours.losses == pytest.approx(theirs.losses, rel=near), numbers
    assert ours.norms[0] == pytest.approx(theirs.norms[0], rel=near), numbers
    apart = np.linalg.norm(ours.update - theirs.update) / np.linalg.norm(theirs.update)
    assert apart < (0.3 if narrow else 0.01), numbers


@cache
def deciding() -> list[tuple[int, ...]]:
    """What decides the numbers of the plans above, of either backend."""
    held = (choices for backend in BACKENDS for choices in covering(backend)[0])
    return sorted({tuple(choices[key] for key in NUMBERS) for choices in held})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_backends_compute_the_same_with_all_that_decides_the_numbers(real: None) -> None:
    assert len(deciding()) > 40
    for numbers in deciding():
        assert_both_compute_the_same(numbers)


def test_both_backends_compute_the_same_with_some_that_decides_the_numbers(real: None) -> None:
    for numbers in random.Random(4).sample(deciding(), 6):
        assert_both_compute_the_same(numbers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_pairs_train_as_a_plain_plan_does(backend: str, real: None) -> None:
    """None that is compiled, which takes a while."""
    held = [choices for choices in covering(backend)[0] if not choices["optimize.compile"]]
    for choices in random.Random(4).sample(held, SAMPLED[backend]):
        assert_trains_as_plain(backend, choices)
