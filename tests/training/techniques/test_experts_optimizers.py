"""Rules that look at whole matrices treat each expert's as one of its own, in both backends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from memconsole.memory.activations import jax_step
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.plan import Plan, replace
from memconsole.plan.training import matrices
from memconsole_jax.techniques.optimizer import optimizers as jax_optimizers
from memconsole_jax.tracing import trace_targets
from memconsole_torch.techniques.optimizer.adafactor import Adafactor
from memconsole_torch.techniques.optimizer.muon import Muon
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted, offloaded
from tests.training.harness.planned_step import planned_step
from tests.training.harness.tiny_models import ARCHITECTURES

torch.set_num_threads(1)
MODEL = adapted.MODELS["experts"]
EXPERTS, ROWS, COLUMNS = 6, 10, 24
SEVERAL = ("layers.mlp.gate.weight", "layers.mlp.up.weight", "layers.mlp.down.weight")
IN_BACKWARD = {"optimize.optimizer_in_backward": True, "train.grad_clip": 0.0}
RULES = ("muon", "adafactor")


@pytest.fixture(params=[1, 2 * ROWS * COLUMNS, matrices.TOGETHER], ids=["alone", "two", "all"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many elements of small matrices are updated at a time."""
    monkeypatch.setattr(matrices, "TOGETHER", request.param)


def arrays(step: int, count: int = EXPERTS) -> np.ndarray:
    random = np.random.default_rng(step)
    return random.standard_normal((count, ROWS, COLUMNS), dtype=np.float32)


def updated(name: str, shape: tuple[int, ...], rows: int) -> list[np.ndarray]:
    """Weights of this shape after three steps of torch's rule, from the numbers of `arrays`."""
    start = torch.from_numpy(arrays(0)).view(-1, *shape)
    weights = [nn.Parameter(w.clone()) for w in start]
    groups = [{"params": weights, "weight_decay": 0.1, "lr": 0.02, "rows": rows}]
    rule: Any = Muon(groups) if name == "muon" else Adafactor(groups)
    for w in weights if name == "muon" else ():
        rule.state[w]["momentum"] = torch.zeros_like(w)
    for step in range(3):
        for w, gradient in zip(
            weights, torch.from_numpy(arrays(1 + step)).view(-1, *shape), strict=True
        ):
            w.grad = gradient.clone()
        rule.step()
    return [w.detach().numpy() for w in weights]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("together")
def test_matrices_in_one_weight_are_updated_as_if_apart(name: str) -> None:
    (one,) = updated(name, (EXPERTS * ROWS, COLUMNS), ROWS)
    apart = np.stack(updated(name, (ROWS, COLUMNS), 0))
    np.testing.assert_allclose(one.reshape(apart.shape), apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("together")
def test_jax_updates_the_matrices_of_every_layer_as_torch_does(name: str) -> None:
    layers = 2
    a = msgspec.structs.replace(
        MODEL, experts=EXPERTS, intermediate_size=ROWS, hidden_size=COLUMNS, layers=layers
    )
    changes = {"optimize.optimizer": name, "train.weight_decay": 0.0}
    rule = jax_optimizers.transformation(replace(Plan(), changes), a)
    shapes = {
        n: (layers, *s.members[0].shape) if s.layered else s.shape
        for n, s in jax_optimizers.stacked(a.parameters()).items()
    }
    found = {n: jnp.zeros(shape) for n, shape in shapes.items()}
    gate = SEVERAL[0]
    start = np.stack([arrays(0), arrays(0)])
    found[gate] = jnp.asarray(start.reshape(shapes[gate]))
    state, update = rule.init(found), jax.jit(rule.update)
    for step in range(3):
        gradients = {n: jnp.zeros(shape) for n, shape in shapes.items()}
        gradients[gate] = jnp.asarray(np.stack([arrays(1 + step)] * 2).reshape(shapes[gate]))
        updates, state = update(gradients, state, found)
        found = {n: w - 0.02 * updates[n] for n, w in found.items()}
    plain = [{"params": [nn.Parameter(torch.from_numpy(start[0].reshape(-1, COLUMNS)))]}]
    plain[0] |= {"lr": 0.02, "rows": ROWS}
    expected: Any = Muon(plain) if name == "muon" else Adafactor(plain)
    (weight,) = plain[0]["params"]
    if name == "muon":
        expected.state[weight]["momentum"] = torch.zeros_like(weight)
    for step in range(3):
        weight.grad = torch.from_numpy(arrays(1 + step).reshape(-1, COLUMNS))
        expected.step()
    for layer in np.asarray(found[gate]):
        np.testing.assert_allclose(layer, weight.detach().numpy(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", RULES)
def test_both_backends_take_the_same_steps_and_go_on_exactly(name: str) -> None:
    changes = {"optimize.optimizer": name}
    found = {b: offloaded.stepped(b, changes, 8, "experts") for b in ("torch", "jax")}
    losses = [losses for _, losses in found.values()]
    assert losses[0][-1] < losses[0][0] - 0.1
    np.testing.assert_allclose(*losses, rtol=1e-4)
    for backend, (engine, _) in found.items():
        held = [x for n, x in adapted.State(engine).tensors.items() if n.startswith("optimizer.")]
        size = sum(x.nbytes for x in held if x.ndim and x.dtype != np.int32)
        state = step_of(offloaded.plan_with(backend, changes), MODEL, "cpu").state
        assert size == pytest.approx(state.resident, rel=0.02)  # Optax fills up with single numbers
        offloaded.resumes(engine, backend, changes)


HOW: dict[str, tuple[str, dict[str, Any]]] = {
    "moments in 16 bits": ("muon", {"optimize.optimizer_offload": "compressed"}),
    "muon, weights in 16 bits": ("muon", {"optimize.precision": "bf16-sr"}),
    "adafactor, weights in 16 bits": ("adafactor", {"optimize.precision": "bf16-sr"}),
    "both in 16 bits": (
        "muon",
        {"optimize.precision": "bf16-sr", "optimize.optimizer_offload": "compressed"},
    ),
}


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", HOW)
def test_few_bits_learn_nearly_the_same_and_go_on_exactly(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, changes = HOW[name]
    size = 2 * MODEL.intermediate_size * MODEL.hidden_size
    monkeypatch.setattr(matrices, "TOGETHER", size)  # 2 of 8 experts at a time
    plain = {"optimize.optimizer": rule}
    engine, found = offloaded.stepped(backend, plain | changes, 8, "experts")
    _, expected = offloaded.stepped(backend, plain, 8, "experts")
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.02)
    offloaded.resumes(engine, backend, plain | changes)


@pytest.mark.parametrize("name", RULES)
def test_updates_inside_the_backward_pass_are_those_of_the_plain_step(name: str) -> None:
    changes = {"optimize.optimizer": name, "train.grad_clip": 0.0}
    plain, expected = offloaded.stepped("torch", changes, 4, "experts")
    engine, found = offloaded.stepped("torch", changes | IN_BACKWARD, 4, "experts")
    assert found == expected
    state = adapted.State(plain)
    for key, array in adapted.State(engine).tensors.items():
        np.testing.assert_array_equal(array, state.tensor(key), key)


MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "in the backward pass": IN_BACKWARD,
    "weights in 16 bits": {"optimize.precision": "bf16-sr"},
    "moments in 16 bits": {"optimize.optimizer_offload": "compressed"},
    "state on the host": {"optimize.optimizer_offload": "pinned"},
}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("how", MEMORY)
def test_the_formula_knows_what_a_step_holds(kind: str, name: str, how: str) -> None:
    if name == "adafactor" and how == "moments in 16 bits":
        pytest.skip("refused: Adafactor's state is too little to compress")
    sizes = {"hidden_size": 512, "intermediate_size": 256, "head_size": 64, "max_positions": 512}
    a = msgspec.structs.replace(ARCHITECTURES["qwen3_moe"], experts=64, **sizes)
    changes = {"data.sequence_length": 128, "train.batch_size": 1, "optimize.optimizer": name}
    case = Case(a, replace(Plan(), changes | MEMORY[how]), kind)
    expected, found = estimated(case), traced(case)
    for phase in TRAINING:
        assert expected[phase] == pytest.approx(found[phase], rel=0.01), phase


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("muon", 2),
        ("lion", 1),
        pytest.param("muon", 1, marks=pytest.mark.slow),
        pytest.param("adafactor", 1, marks=pytest.mark.slow),
    ],
)
def test_the_formula_knows_what_xla_plans_on_a_cpu(name: str, parts: int) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 128, "head_size": 64, "max_positions": 512}
    a = msgspec.structs.replace(
        ARCHITECTURES["qwen3_moe"], experts=32, layers=2, vocab_size=500, **sizes
    )
    changes = {
        "backend": "jax",
        "device.name": "cpu",
        "data.sequence_length": 64,
        "train.batch_size": 1,
        "optimize.optimizer": name,
        "optimize.accumulation_steps": parts,
    }
    plan = replace(Plan(), changes)
    peak = max(m.total for m in jax_step.moments(step_of(plan, a, "cpu")) if m.phase in TRAINING)
    planned = planned_step(plan, a, trace_targets.target("", "cpu"))
    assert peak == pytest.approx(planned.needed, rel=0.04)
