"""Moments that wait in bf16: half the state, the same training, the same bits in both backends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import PlanError
from memconsole_jax.compiled import offload as jax_offload
from memconsole_jax.techniques.optimizer import compressed as jax_compressed
from memconsole_torch.techniques.optimizer import compressed as torch_compressed
from memconsole_torch.techniques.optimizer.compressed import Compressed
from memconsole_torch.techniques.weights import rounding as torch_rounding
from memconsole_trainer.techniques.compressed import slot_index
from memconsole_trainer.techniques.rounding import tensor_key
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted
from tests.training.harness.adapted import MODELS, batch, built
from tests.training.harness.grids import spread
from tests.training.harness.offloaded import IN_BACKWARD, LORA, ROUNDED, plan_with, resumes, stepped
from tests.training.harness.reference import random_bits, rounded

torch.set_num_threads(1)
KEY = "optimize.optimizer_offload"
HERE = {KEY: "compressed"}
RULES = ("adamw", "lion", "sgd", "muon")
BACKENDS = ("torch", "jax")
STEPS = 16
EVERYTHING = {
    "optimize.precision": "bf16",
    "optimize.gradient_checkpointing": "full",
    "optimize.fused_loss": True,
    "optimize.accumulation_steps": 2,
    "train.ema_decay": 0.9,
    "train.batch_size": 2,
}
MEDIUM = Architecture(
    family="llama", vocab_size=2000, hidden_size=256, layers=2, heads=4, kv_heads=2, head_size=64,
    intermediate_size=760, max_positions=512, tied_embeddings=False,
)  # fmt: skip


def moments(engine: Any) -> dict[str, np.ndarray]:
    found = adapted.State(engine).tensors.items()
    return {n: x for n, x in found if n.startswith("optimizer.") and x.ndim and "base" not in n}


def state_bytes(engine: Any) -> int:
    return sum(x.nbytes for x in moments(engine).values())


@pytest.mark.parametrize(
    ("backend", "rule"), [*(("torch", rule) for rule in RULES), ("jax", "adamw")]
)
def test_the_state_is_half_as_large_and_trains_the_same(backend: str, rule: str) -> None:
    rate = 1e-3 if rule == "lion" else 1e-2
    changes = {"optimize.optimizer": rule, "train.learning_rate": rate}
    engine, found = stepped(backend, changes | HERE, STEPS)
    plain, expected = stepped(backend, changes, STEPS)
    assert 2 * state_bytes(engine) == state_bytes(plain)
    state = step_of(plan_with(backend, changes | HERE), MODELS["llama"], "cpu").state
    assert state.resident == state_bytes(engine)
    assert found != expected
    assert expected[-1] < expected[0] - 0.02
    np.testing.assert_allclose(found, expected, rtol=0.01)


@pytest.mark.parametrize("rule", ["lion", "muon"])
def test_both_backends_store_the_same_moments(rule: str) -> None:
    changes = {"optimize.optimizer": rule, "train.learning_rate": 1e-3, **HERE}
    torch_engine, ours = stepped("torch", changes, 3)
    jax_engine, theirs = stepped("jax", changes, 3)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    found = {_by_weight(n): x for n, x in moments(torch_engine).items()}
    expected = {_by_weight(n): x for n, x in moments(jax_engine).items()}
    assert set(found) == set(expected)
    for name, array in found.items():
        np.testing.assert_array_less(
            np.abs(array.astype(np.float32) - expected[name].astype(np.float32)),
            0.05 * np.abs(expected[name].astype(np.float32)).max() + 1e-30,
            name,
        )
    same = np.concatenate([(x == expected[n]).ravel() for n, x in found.items()])
    assert same.mean() > 0.98


def _by_weight(name: str) -> tuple[str, str]:
    """(weight, first | second) of a moment's name in either backend's checkpoint."""
    second = "nu" in name.split(".") or name.endswith("exp_avg_sq")
    weight = name.removeprefix("optimizer.")
    for slot in (".exp_avg_sq", ".exp_avg", ".momentum_buffer", ".momentum"):
        weight = weight.removesuffix(slot)
    parts = weight.split(".")
    start = next(i for i, p in enumerate(parts) if p in ("embedding", "layers", "norm", "head"))
    return ".".join(parts[start:]), "second" if second else "first"


@pytest.mark.parametrize(
    ("backend", "changes"),
    [("torch", {}), ("torch", LORA), ("jax", LORA)],
    ids=["torch", "torch adapters", "jax adapters"],
)
def test_it_composes_and_a_resumed_run_is_exact(backend: str, changes: dict[str, Any]) -> None:
    changes = EVERYTHING | HERE | changes
    engine, found = stepped(backend, changes, 6)
    _, expected = stepped(backend, changes | {KEY: "none"}, 6)
    np.testing.assert_allclose(found, expected, rtol=0.01)
    resumes(engine, backend, changes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_skips_a_step_and_leaves_the_state_to_the_bit(backend: str) -> None:
    changes = {"optimize.precision": "fp16", **HERE}
    plan = plan_with(backend, changes)
    engine = built(plan)
    engine.train_step(batch(plan, 0))
    before = moments(engine)
    loaded = adapted.State(engine)
    scale = next(n for n in loaded.names() if "scale" in n)
    loaded.tensors[scale] = loaded.tensors[scale].copy()
    loaded.tensors[scale][0] = 1e30
    engine.load_state(loaded)
    engine.train_step(batch(plan, 1))
    after = moments(engine)
    for name, array in before.items():
        if array.size > 3:
            np.testing.assert_array_equal(array, after[name], name)
    resumes(engine, backend, changes)


@pytest.mark.parametrize("more", [{}, IN_BACKWARD, ROUNDED, ROUNDED | IN_BACKWARD], ids=str)
def test_torch_takes_the_same_steps_wherever_the_state_waits(
    more: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    _, here = stepped("torch", more | HERE, 4)
    request.getfixturevalue("moving")
    engine, moved = stepped("torch", more | HERE, 4)
    assert here == moved
    resumes(engine, "torch", more | HERE)


def test_jax_keeps_it_in_pinned_memory(moving: None) -> None:
    engine, _ = stepped("jax", HERE, 2)
    for x in jax.tree.leaves(engine._train_state.optimizer):
        assert (x.sharding.memory_kind == jax_offload.PINNED) == (x.ndim > 0)
        assert x.ndim == 0 or (x.dtype == jnp.uint16 and jnp.any(x != 0))


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adamw8-all", "adafactor"])
def test_what_is_small_already_is_refused(optimizer: str) -> None:
    for backend in BACKENDS:
        with pytest.raises(PlanError, match="its state"):
            plan_with(backend, {"optimize.optimizer": optimizer, **HERE})


@pytest.mark.parametrize("rule", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_may_be_rounded_beside_it(backend: str, rule: str) -> None:
    """Rounding of moments comes to that of weights, and is as exact when resumed."""
    rate = 1e-3 if rule == "lion" else 1e-2
    changes = {"optimize.optimizer": rule, "train.learning_rate": rate, **ROUNDED}
    engine, found = stepped(backend, changes | HERE, STEPS)
    plain, expected = stepped(backend, changes, STEPS)
    assert 2 * state_bytes(engine) == state_bytes(plain)
    assert found != expected
    assert expected[-1] < expected[0] - 0.02
    np.testing.assert_allclose(found, expected, rtol=0.01)
    resumes(engine, backend, changes | HERE)


def test_a_slice_of_a_rounded_weight_has_the_moments_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"optimize.optimizer": "lion", "train.grad_clip": 0.0, **ROUNDED, **HERE}
    whole, _ = stepped("torch", changes, 3)
    monkeypatch.setattr(torch_rounding, "CPU_SLICE", 1024)
    sliced, _ = stepped("torch", changes, 3)
    state = adapted.State(whole)
    for name, array in adapted.State(sliced).tensors.items():
        np.testing.assert_array_equal(array, state.tensor(name), name)


@pytest.mark.parametrize("shape", [(3, 700), (2500,)])
def test_slices_of_any_size_give_the_bits_of_the_specification(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is an average whose every intermediate is exact in fp32, so that the reference is NumPy's."""
    seed, place = 5 + 2**33, 3
    gradients = [
        np.random.default_rng(i).integers(-8, 8, shape).astype(np.float32) for i in range(6)
    ]
    wanted = np.zeros(shape, np.float32)
    for count, gradient in enumerate(gradients):
        wanted = wanted * np.float32(0.5) + gradient
        key = tensor_key(seed, count, slot_index(place, 0))
        wanted = rounded(wanted.ravel(), random_bits(key, wanted.size)).reshape(shape)

    monkeypatch.setattr(torch_compressed, "CPU_SLICE", 1024)
    weight = torch.nn.Parameter(torch.zeros(shape))
    rule = torch.optim.SGD([weight], lr=0.0, momentum=0.5)
    rule.state[weight]["momentum_buffer"] = torch.zeros(shape)
    optimizer = Compressed(rule, seed, place)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    found = optimizer.state[weight]["momentum_buffer"]
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.float().numpy(), wanted)

    where = {"w": jax_compressed.Place(np.uint32([place]), layered=False)}
    update = jax_compressed.compressed(optax.trace(0.5), where, seed, 1000)
    state = update.init({"w": jnp.zeros(shape)})
    run = jax.jit(update.update)
    for gradient in gradients:
        _, state = run({"w": jnp.asarray(gradient)}, state)
    kept = np.asarray(state.rule.trace["w"]).view(jnp.bfloat16)
    np.testing.assert_array_equal(kept.astype(np.float32), wanted)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_second_moment_follows_its_gradients_where_rounding_to_nearest_would_stall(
    beta2: float,
) -> None:
    """From 0.28 to a square of 0.25, by a rule that averages alike: the mean is that, within the deviation that the
    specification states."""
    n, steps = 1024, int(3 / (1 - beta2))
    weight = torch.nn.Parameter(torch.zeros(n))
    rule = torch.optim.SGD([weight], lr=0.0, momentum=beta2, dampening=beta2)
    rule.state[weight]["momentum_buffer"] = torch.full((n,), 0.28)
    optimizer = Compressed(rule, 1, 0)
    weight.grad = torch.full((n,), 0.25)
    nearest = torch.full((n,), 0.28).bfloat16()
    for _ in range(steps):
        optimizer.step()
        nearest = nearest.float().lerp(weight.grad, 1 - beta2).bfloat16()
    found = optimizer.state[weight]["momentum_buffer"].float() / 0.25
    assert abs(float(found.mean()) - 1) < 0.015
    assert float(found.std()) < 2**-8 / (1 - beta2**2) ** 0.5
    if beta2 > 0.99:
        assert float(nearest.float().mean()) > 0.279


def test_the_step_needs_a_slice_beside_the_state_in_jax() -> None:
    shape = jax.ShapeDtypeStruct((2**22,), jnp.float32)
    where = {"w": jax_compressed.Place(np.uint32([0]), layered=False)}
    update = jax_compressed.compressed(optax.scale_by_adam(), where, 0)
    state = jax.eval_shape(update.init, {"w": shape})

    def step(gradient: Any, state: Any) -> Any:
        updates, after = update.update({"w": gradient}, state)
        return updates["w"], after

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(shape, state).compile()
    assert "bf16" not in compiled.as_text()  # or each slice would convert the whole array
    analysis = compiled.memory_analysis()
    assert analysis.argument_size_in_bytes < 8 * 2**22 + 1024
    assert analysis.temp_size_in_bytes < 20 * jax_compressed.CPU_SLICE


@pytest.mark.parametrize(
    ("kind", "optimizer", "more"),
    spread(["cpu", "gpu"], RULES, [{}, IN_BACKWARD, ROUNDED, ROUNDED | IN_BACKWARD]),
    ids=str,
)
def test_every_phase_is_priced_as_it_is_traced(
    kind: str, optimizer: str, more: dict[str, Any]
) -> None:
    peaks = []
    for value in ("none", "compressed"):
        plan = plan_with("torch", {"optimize.optimizer": optimizer, KEY: value, **more})
        case = Case(MEDIUM, plan, kind)
        expected, found = estimated(case), traced(case)
        for phase in TRAINING:
            assert expected[phase] == pytest.approx(found[phase], rel=0.03), (value, phase)
        peaks.append(max(found[phase] for phase in TRAINING))
    assert peaks[0] > peaks[1]
