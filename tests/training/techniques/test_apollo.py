"""APOLLO-Mini in both backends: one rule, the specification's, for the matrices; AdamW for the rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from numpy.typing import NDArray

from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import parameters
from memconsole.plan.plan import Plan
from memconsole_jax.techniques.optimizer import apollo as jax_apollo
from memconsole_torch.techniques.optimizer import apollo as torch_apollo
from memconsole_trainer.techniques import apollo
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted, offloaded, tiny_models
from tests.training.harness.adapted import MODELS, batch

torch.set_num_threads(1)
SHAPES = [(24, 24), (40, 16), (16, 40), (8, 1)]
STEPS = 8
RATE, DECAY, BETA1, BETA2, EPSILON, SEED = 0.02, 0.1, 0.9, 0.95, 1e-8, 7
APOLLO = {"optimize.optimizer": "apollo-mini"}

Floats = NDArray[np.float64]


def plan_with(backend: str, changes: dict[str, Any] | None = None) -> Plan:
    return offloaded.plan_with(backend, APOLLO | (changes or {}))


def losses(backend: str, changes: dict[str, Any] | None = None) -> tuple[Any, list[float]]:
    return offloaded.stepped(backend, APOLLO | (changes or {}), STEPS)


def signs_of(length: int, period: int) -> Floats:
    drawn = torch_apollo.drawn(length, SEED, period, torch.device("cpu"))
    return drawn.double().numpy()


class Reference:
    """The specification for one matrix, in fp64."""

    def __init__(self, weight: Floats) -> None:
        self.weight, self.count, self.size = weight, 0, 0.0
        self.m = self.v = np.zeros(max(weight.shape))

    def step(self, g: Floats) -> None:
        self.count += 1
        s = signs_of(min(g.shape), (self.count - 1) // apollo.PERIOD)
        r = g @ s if g.shape[0] >= g.shape[1] else s @ g
        self.m = BETA1 * self.m + (1 - BETA1) * r
        self.v = BETA2 * self.v + (1 - BETA2) * r**2
        a = self.m / (1 - BETA1**self.count)
        a = a / (np.sqrt(self.v / (1 - BETA2**self.count)) + EPSILON)
        factor = np.sqrt(len(s)) * np.linalg.norm(a) / (np.linalg.norm(r) + apollo.EPSILON)
        u = factor * g
        if self.size:
            u = u * min(1.0, apollo.GROWTH * self.size / np.linalg.norm(u))
        self.size = float(np.linalg.norm(u))
        self.weight = self.weight * (1 - RATE * DECAY) - RATE * u


def gradients(shape: tuple[int, ...], steps: int) -> list[NDArray[np.float32]]:
    """Gradients whose size varies, so that the limit of growth acts in some steps."""
    random = np.random.default_rng(0)
    sizes = 10 ** random.uniform(-2, 1, steps)
    return [np.float32(size) * random.standard_normal(shape, dtype=np.float32) for size in sizes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [0, apollo.PERIOD - 3])
def test_updates_are_those_of_the_specification(shape: tuple[int, int], first: int) -> None:
    start = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    ours = torch_apollo.ApolloMini(
        [{"params": [weight], "weight_decay": DECAY, "lr": RATE}], (BETA1, BETA2), EPSILON, SEED
    )
    settings = jax_apollo.Settings(BETA1, BETA2, EPSILON, SEED)
    theirs = optax.chain(
        jax_apollo.scale_by_apollo_mini({"w": shape}, optax.scale_by_adam(), settings),
        optax.add_decayed_weights(DECAY),
    )
    other = {"w": jnp.asarray(start)}
    state: Any = theirs.init(other)
    reference = Reference(start.astype(np.float64))
    if first:  # the moments are 0 and the count is not: only the signs and the correction of the bias depend on it
        reference.count = first
        ours.param_groups[0]["count"] = first
        count = jnp.asarray(first, jnp.int32)
        state = (state[0]._replace(rest=state[0].rest._replace(count=count)), *state[1:])
    for g in gradients(shape, 8):
        weight.grad = torch.from_numpy(g.copy())
        ours.step()
        updates, state = theirs.update({"w": jnp.asarray(g)}, state, other)
        other = jax.tree.map(lambda w, u: w - RATE * u, other, updates)
        reference.step(g.astype(np.float64))
    np.testing.assert_allclose(weight.detach().numpy(), reference.weight, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(np.asarray(other["w"]), reference.weight, rtol=2e-5, atol=2e-6)


def test_each_of_several_matrices_is_updated_by_itself() -> None:
    """A weight of three matrices, one below the other, is updated as three weights are."""
    rows, columns = 24, 16
    start = np.random.default_rng(2).standard_normal((3 * rows, columns), dtype=np.float32)
    whole = torch.nn.Parameter(torch.from_numpy(start.copy()))
    apart = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in np.split(start, 3)]
    groups = ([{"params": [whole], "lr": RATE, "rows": rows}], [{"params": apart, "lr": RATE}])
    rules = [torch_apollo.ApolloMini(g, (BETA1, BETA2), EPSILON, SEED) for g in groups]
    settings = jax_apollo.Settings(BETA1, BETA2, EPSILON, SEED)
    theirs = jax_apollo.scale_by_apollo_mini(
        {"w": (rows, columns)}, optax.scale_by_adam(), settings
    )
    other = {"w": jnp.asarray(start)[None]}
    state: Any = theirs.init(other)
    assert state.mu["w"].shape == (1, 3 * rows)
    assert state.size["w"].shape == (1, 3)
    for g in gradients(start.shape, 4):
        whole.grad = torch.from_numpy(g.copy())
        for one, part in zip(apart, np.split(g, 3), strict=True):
            one.grad = torch.from_numpy(part.copy())
        for rule in rules:
            rule.step()
        updates, state = theirs.update({"w": jnp.asarray(g)[None]}, state, other)
        other = jax.tree.map(lambda w, u: w - RATE * u, other, updates)
    expected = torch.cat(list(apart)).detach()
    torch.testing.assert_close(whole.detach(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(other["w"][0]), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 768, 4096])
def test_signs_are_balanced_and_the_same_in_both(length: int) -> None:
    rows = []
    for period in range(40):
        ours = signs_of(length, period)
        theirs = jax_apollo.drawn(length, SEED, jnp.asarray(period))
        np.testing.assert_array_equal(ours, np.asarray(theirs))
        on_device = torch_apollo.drawn(length, SEED, torch.tensor(period), torch.device("cpu"))
        np.testing.assert_array_equal(ours, on_device.numpy())
        rows.append(ours)
    found = np.stack(rows)
    assert set(np.unique(found)) == {-1.0, 1.0}
    assert abs(found.mean()) < 5 / np.sqrt(found.size)
    if length > 1:
        neighbours = (found[:, 1:] * found[:, :-1]).mean(), (found[1:] * found[:-1]).mean()
        assert max(map(abs, neighbours)) < 5 / np.sqrt(found.size - length)


def test_both_backends_take_the_same_steps() -> None:
    (ours, our_losses), (theirs, their_losses) = losses("torch"), losses("jax")
    assert our_losses[-1] < our_losses[0] - 0.1
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4)
    step = step_of(plan_with("torch"), MODELS["llama"], "cpu")
    matrices = [p for p in parameters(MODELS["llama"]) if p.role == "matrix"]
    for engine in (ours, theirs):
        saved = {n: x for n, x in engine.state() if n.startswith("optimizer.") and x.ndim}
        assert sum(x.nbytes for x in saved.values()) == pytest.approx(step.state.resident, abs=16)
        sizes = [n for n in saved if ".size." in n or n.endswith(".size")]
        assert len(sizes) == len(matrices)
    plain = step_of(plan_with("torch", {"optimize.optimizer": "adamw"}), MODELS["llama"], "cpu")
    saved_bytes = sum(8 * p.size - 4 * (2 * max(p.shape) + 1) for p in matrices)
    assert plain.state.resident - step.state.resident == saved_bytes


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(
    "changes",
    [
        adapted.COMPOSED,
        {"optimize.precision": "bf16-sr"},
        {"optimize.precision": "fp16"},
        {"optimize.optimizer_offload": "pinned"},
    ],
    ids=["composed", "bf16-sr", "fp16", "offload"],
)
def test_it_composes_with_everything_else(backend: str, changes: dict[str, Any]) -> None:
    engine, found = losses(backend, changes | APOLLO)
    np.testing.assert_allclose(found, losses("torch")[1], rtol=0.02)
    before = adapted.State(engine)
    plan = plan_with(backend, changes | APOLLO)
    engine.train_step(batch(plan, 5))
    after = adapted.State(engine)
    engine.load_state(before)
    engine.train_step(batch(plan, 5))
    for name, array in adapted.State(engine).tensors.items():
        np.testing.assert_array_equal(array, after.tensor(name), name)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_phase_is_priced_as_it_is_traced(kind: str) -> None:
    for changes in (
        {},
        {"optimize.precision": "bf16-sr"},
        {
            "optimize.optimizer_in_backward": True,
            "train.grad_clip": 0.0,
            "optimize.accumulation_steps": 1,
        },
    ):
        case = Case(tiny_models.ARCHITECTURES["llama"], plan_with("torch", changes), kind)
        expected, found = estimated(case), traced(case)
        for phase in TRAINING:
            assert expected[phase] == pytest.approx(found[phase], rel=0.03), (changes, phase)
