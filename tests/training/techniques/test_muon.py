"""Muon in both backends: one rule, torch's own, for the matrices; AdamW for the rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import parameters
from memconsole.plan.plan import Plan
from memconsole_jax.techniques.optimizer import muon as jax_muon
from memconsole_torch.techniques.optimizer import muon as torch_muon
from memconsole_trainer.techniques import muon
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted, offloaded, tiny_models
from tests.training.harness.adapted import MODELS, batch

torch.set_num_threads(1)
SHAPES = [(24, 24), (40, 16), (16, 40), (8, 1)]
STEPS = 8


MUON = {"optimize.optimizer": "muon"}


def plan_with(backend: str, changes: dict[str, Any] | None = None) -> Plan:
    return offloaded.plan_with(backend, MUON | (changes or {}))


def losses(backend: str, changes: dict[str, Any] | None = None) -> tuple[Any, list[float]]:
    return offloaded.stepped(backend, MUON | (changes or {}), STEPS)


@pytest.mark.parametrize("shape", SHAPES)
def test_five_updates_are_torchs_own_but_for_its_rounding_to_bf16(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    start = random.standard_normal(shape, dtype=np.float32)
    ours, theirs = (torch.nn.Parameter(torch.from_numpy(start.copy())) for _ in range(2))
    mine = torch_muon.Muon([{"params": [ours], "weight_decay": 0.1}])
    mine.state[ours]["momentum"] = torch.zeros_like(ours)
    mine.param_groups[0]["lr"] = 0.02
    reference = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=muon.MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        gradient = torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    moved = (theirs.detach() - torch.from_numpy(start)).norm()
    assert float((ours.detach() - theirs.detach()).norm() / moved) < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_what_it_makes_of_a_matrix_is_nearly_orthogonal_and_the_same_in_both(
    shape: tuple[int, int],
) -> None:
    x = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    ours = torch_muon.orthogonalized(torch.from_numpy(x.copy())[None])[0].numpy()
    theirs = np.asarray(jax_muon.orthogonalized(jnp.asarray(x)))
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    singular = np.linalg.svd(ours.astype(np.float64), compute_uv=False)
    assert singular.min() > 0.3
    assert singular.max() < 1.3
    u, _, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    assert np.linalg.norm(ours - u @ v) < 0.4 * np.linalg.norm(u @ v)


def test_both_backends_take_the_same_steps() -> None:
    (ours, our_losses), (theirs, their_losses) = losses("torch"), losses("jax")
    assert our_losses[-1] < our_losses[0] - 0.1
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4)
    names = {p.name: p for p in parameters(MODELS["llama"])}
    for engine, word in ((ours, "momentum"), (theirs, "momentum")):
        saved = dict(engine.state())
        inside = {n for n in saved if word in n and n.startswith("optimizer.")}
        matrices = {n for n, p in names.items() if p.role == "matrix"}
        assert len(inside) == len(matrices)
        held = sum(x.nbytes for n, x in saved.items() if n.startswith("optimizer.") and x.ndim)
        step = step_of(plan_with("torch"), MODELS["llama"], "cpu")
        assert held == pytest.approx(step.state.resident, abs=16)
    plain = step_of(plan_with("torch", {"optimize.optimizer": "adamw"}), MODELS["llama"], "cpu")
    assert plain.state.resident - step.state.resident == 4 * sum(
        p.size for p in names.values() if p.role == "matrix"
    )


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_it_composes_with_everything_else(backend: str) -> None:
    composed = adapted.COMPOSED | {"optimize.optimizer": "muon"}
    lora = {"optimize.lora_rank": 4, "optimize.freeze_base": True, "optimize.base_storage": "nf4"}
    whole = losses(backend, composed)[1]
    np.testing.assert_allclose(whole, losses("torch")[1], rtol=0.02)
    engine, found = losses(backend, composed | lora)
    assert found[-1] < found[0]
    before = adapted.State(engine)
    plan = plan_with(backend, composed | lora)
    engine.train_step(batch(plan, 5))
    after = adapted.State(engine)
    engine.load_state(before)
    engine.train_step(batch(plan, 5))
    for name, array in adapted.State(engine).tensors.items():
        np.testing.assert_array_equal(array, after.tensor(name), name)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_phase_is_priced_as_it_is_traced(kind: str) -> None:
    for changes in ({}, {"optimize.lora_rank": 16, "optimize.freeze_base": True}):
        case = Case(tiny_models.ARCHITECTURES["llama"], plan_with("torch", changes), kind)
        expected, found = estimated(case), traced(case)
        for phase in TRAINING:
            assert expected[phase] == pytest.approx(found[phase], rel=0.03), phase


def test_jax_orthogonalizes_one_layer_at_a_time() -> None:
    """XLA's plan of the update alone: its temporaries do not grow with the layers."""
    needed = []
    for layers in (2, 8):
        rule = jax_muon.scale_by_muon({"w": (96, 64)}, optax.scale_by_adam())
        shape = jax.ShapeDtypeStruct((layers, 96, 64), jnp.float32)
        state = jax.eval_shape(rule.init, {"w": shape})
        run = jax.jit(lambda g, s, rule=rule: rule.update(g, s), donate_argnums=(0, 1))
        analysis = run.lower({"w": shape}, state).compile().memory_analysis()
        needed.append(analysis.temp_size_in_bytes)
    assert needed[1] == pytest.approx(needed[0], rel=0.05)
