"""What is frozen is a property of weights: both engines hold what the estimate says, and only what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch

from memconsole.memory.exact import affine
from memconsole.memory.formula import moments
from memconsole.memory.seconds import step_flops
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.plan import Plan, replace
from memconsole.plan.tasks import LANGUAGE, task_of_model
from memconsole.plan.training.trained import frozen_names
from memconsole_jax.compiled.programs import Programs
from memconsole_torch import engine as torch_engine
from memconsole_torch.techniques.optimizer import optimizers
from memconsole_torch.tracing import trace
from memconsole_trainer.techniques.adapters import FINGERPRINT, Merged, bf16_rounded
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.engine.test_regressor import MODEL as REGRESSOR
from tests.training.harness.adapted import MODELS
from tests.training.harness.tiny_models import batch

torch.set_num_threads(1)

DECODER = MODELS["llama"]
TRAINED: dict[str, tuple[Model, tuple[str, ...]]] = {
    "table below frozen blocks": (DECODER, ("embedding.", "norm.")),
    "head above frozen blocks": (REGRESSOR, ("head.",)),
    "input below frozen blocks": (REGRESSOR, ("input.",)),
    "biases": (REGRESSOR, tuple(f"layers.{n}.mlp.up.bias" for n in range(2))),
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"optimize.precision": "bf16", "optimize.optimizer": "adamw-8bit"},
    {"optimize.precision": "bf16-sr", "optimize.accumulation_steps": 2},
)
Trains = Callable[[str], Model]


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trains]:
    """The model of a case, whose task then trains only the case's weights."""

    def trains(case: str) -> Model:
        model, begin = TRAINED[case]

        def trained(self: object, plan: Plan, model: Model) -> list[Parameter]:
            return [p for p in model.parameters() if p.name.startswith(begin)]

        monkeypatch.setattr(type(task_of_model(model)), "trained", trained)
        step_of.cache_clear()  # it may know the plan with other trained weights
        return model

    yield trains
    step_of.cache_clear()


def plan_with(changes: dict[str, Any], backend: str = "torch") -> Plan:
    own = {
        "backend": backend,
        "device.name": "cpu",
        "data.sequence_length": 8,
        "train.batch_size": 4,
    }
    return replace(Plan(), own | changes)


def nbytes(tree: Any) -> int:
    """Bytes of arrays, or of their shapes; scalars that count steps are left out."""
    sizes = ((int(np.prod(x.shape)), x.dtype.itemsize) for x in jax.tree.leaves(tree) if x.shape)
    return sum(size * width for size, width in sizes)


@pytest.mark.parametrize("changes", SETTINGS, ids=["fp32", "bf16", "bf16-sr"])
@pytest.mark.parametrize("case", TRAINED)
def test_torch_holds_the_weights_gradients_and_state_of_the_estimate(
    case: str, changes: dict[str, Any], trains: Trains
) -> None:
    model, plan = trains(case), plan_with(changes)
    engine = torch_engine.create(plan, None)
    engine.build(plan, model, 10, InitialWeights(model, 0))
    step = step_of(plan, model, "cpu")
    held = sum(p.nbytes for p in engine.module.parameters())
    assert held == step.weights
    assert (held < 4 * step.sizes.total) == (plan.optimize.precision != "fp32")
    assert step.trained.elements == engine.trainable_parameters
    gradients = sum(p.numel() * step.gradient for p in engine._trained if p.dim() > 1)
    gradients += sum(4 * p.numel() for p in engine._trained if p.dim() == 1)
    assert gradients == step.gradients
    state = optimizers.slots(engine._optimizer, engine.module)
    assert sum(t.nbytes for _, t in state if t.dim()) == step.state.resident


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("changes", SETTINGS, ids=["fp32", "bf16", "bf16-sr"])
@pytest.mark.parametrize("case", TRAINED)
def test_the_programs_of_jax_have_the_arguments_of_the_estimate(
    case: str, changes: dict[str, Any], kind: str, trains: Trains
) -> None:
    model, plan = trains(case), plan_with(changes, "jax")
    programs = Programs.of(plan, model, kind, jax.devices("cpu")[0])
    step = step_of(plan, model, kind)
    assert nbytes([programs.trained_shapes, programs.frozen_shapes]) == step.weights
    assert nbytes(programs.state_shapes) == step.state.resident
    elements = sum(int(np.prod(x.shape)) for x in programs.trained_shapes.values())
    assert elements == step.trained.elements


@pytest.mark.parametrize(
    "changes",
    [*SETTINGS[:2], {"optimize.gradient_checkpointing": "full"}],
    ids=["fp32", "bf16", "checkpointed"],
)
def test_a_table_below_a_frozen_decoder_is_priced_as_it_is_traced(
    changes: dict[str, Any], trains: Trains
) -> None:
    """Gradients pass through the frozen blocks, which keep all but the inputs of their matrices."""
    model, plan = trains("table below frozen blocks"), plan_with(changes)
    timeline = trace.record(plan, model, "cpu", internal=False).timeline
    exact = affine.evaluate(timeline, plan.train.batch_size, plan.data.sequence_length)
    found: dict[str, int] = {}
    for moment in moments(step_of(plan, model, "cpu")):
        found[moment.phase] = max(found.get(moment.phase, 0), moment.total)
    for phase, traced in exact.phases.items():
        assert found[phase] == pytest.approx(traced.total_bytes, rel=0.01), phase


def test_frozen_weights_take_no_operations_for_their_gradients(trains: Trains) -> None:
    plan = plan_with({})
    everything = step_flops(plan, REGRESSOR)
    share = step_flops(plan, trains("input below frozen blocks")) / everything
    own, whole = (
        3 * 16,
        sum(p.size for p in REGRESSOR.parameters() if p.role in ("input", "matrix", "head")),
    )
    assert share == pytest.approx((2 + own / whole) / 3)
    share = step_flops(plan, trains("head above frozen blocks")) / everything
    assert share == pytest.approx((1 + 2 * 2 * 16 / whole) / 3)


def test_a_checkpoint_lacks_frozen_weights_and_knows_them(trains: Trains) -> None:
    plan = plan_with({"optimize.precision": "bf16"})
    model = trains("table below frozen blocks")
    first = InitialWeights(model, 0)
    engine = torch_engine.create(plan, None)
    engine.build(plan, model, 10, first)
    engine.train_step(batch(1, 4, 8))
    saved = {name: np.array(tensor) for name, tensor in engine.state()}
    names = {n.removeprefix("model.") for n in saved if n.startswith("model.")}
    assert names == {"embedding.weight", "norm.weight"}
    assert FINGERPRINT in saved
    merged = Merged(plan, model, first, lambda name: saved[f"model.{name}"])
    frozen = frozen_names(plan, model)
    assert set(frozen) | names == {p.name for p in model.parameters()}
    for p in model.parameters():
        held = dict(engine.module.named_parameters())[p.name].detach().float().numpy()
        np.testing.assert_array_equal(merged.tensor(p.name), held, p.name)
        if p.name in frozen and p.role == "matrix":
            np.testing.assert_array_equal(held, bf16_rounded(first.tensor(p.name)))


def test_adapters_freeze_every_weight_and_a_plain_plan_none() -> None:
    adapted = plan_with({"optimize.lora_rank": 4, "optimize.freeze_base": True})
    every = tuple(p.name for p in DECODER.parameters())
    assert frozen_names(adapted, DECODER) == every
    assert frozen_names(plan_with({}), DECODER) == ()
    assert LANGUAGE.trained(adapted, DECODER) == []
