"""Optimizer state in host memory: the same steps bit for bit, and no more of it on the device than estimated."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import PlanError
from memconsole_jax.compiled import offload as jax_offload
from memconsole_jax.tracing import trace_targets
from memconsole_torch.techniques.optimizer import offload as torch_offload
from memconsole_trainer.techniques import loss_scale
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted
from tests.training.harness.adapted import MODELS, batch, built
from tests.training.harness.grids import spread
from tests.training.harness.offloaded import IN_BACKWARD, LORA, ROUNDED, plan_with, resumes, stepped
from tests.training.harness.planned_step import planned_step
from tests.training.harness.step_memory import step_memory

torch.set_num_threads(1)
KEY = "optimize.optimizer_offload"
EVERYTHING = {
    "optimize.precision": "bf16",
    "optimize.gradient_checkpointing": "full",
    "optimize.fused_loss": True,
    "optimize.accumulation_steps": 2,
    "optimize.optimizer": "adamw-8bit",
    "train.batch_size": 2,
}


def assert_same(found: Any, expected: Any) -> None:
    state = adapted.State(expected)
    assert set(adapted.State(found).names()) == set(state.names())
    for name, array in adapted.State(found).tensors.items():
        np.testing.assert_array_equal(array, state.tensor(name), name)


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        ("cpu", {}),
        ("pinned", {"optimize.optimizer": "muon"}),
        ("cpu", {"optimize.optimizer": "adafactor"}),
        ("pinned", {"optimize.optimizer": "apollo-mini"}),
        ("pinned", IN_BACKWARD),
        ("pinned", ROUNDED),
        ("cpu", ROUNDED | IN_BACKWARD | {"optimize.optimizer": "adamw-8bit"}),
        ("pinned", EVERYTHING),
        ("cpu", EVERYTHING | LORA),
    ],
    ids=str,
)
def test_torch_takes_the_same_steps_clipped_scheduled_and_accumulated(
    value: str, changes: dict[str, Any], moving: None
) -> None:
    plain, expected = stepped("torch", changes)
    engine, found = stepped("torch", changes | {KEY: value})
    assert found == expected
    assert_same(engine, plain)
    resumes(engine, "torch", changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimize.optimizer": "muon"},
        {"optimize.optimizer": "adafactor"},
        {"optimize.optimizer": "apollo-mini"},
        {"optimize.precision": "fp16", "train.ema_decay": 0.9},
        {"optimize.optimizer": "adamw8-all"},
        ROUNDED,
        EVERYTHING | LORA,
    ],
    ids=str,
)
def test_jax_takes_the_same_steps_through_pinned_memory(
    changes: dict[str, Any], moving: None
) -> None:
    plain, expected = stepped("jax", changes)
    engine, found = stepped("jax", changes | {KEY: "pinned"})
    assert waits(engine)
    # Programs apart round otherwise, and Adam's first updates divide small gradients by themselves.
    # A weight that rounds the other way is off by 2^-8 of itself.
    rtol = {"bf16-sr": 1e-3, "fp16": 2e-4}.get(changes.get("optimize.precision", ""), 2e-5)
    np.testing.assert_allclose(found, expected, rtol=rtol)
    state = adapted.State(plain)
    assert set(adapted.State(engine).names()) == set(state.names())
    for name, array in adapted.State(engine).tensors.items():
        if array.dtype.kind in "iu" and array.ndim == 0:  # counts
            np.testing.assert_array_equal(array, state.tensor(name), name)
    resumes(engine, "jax", changes | {KEY: "pinned"})
    assert waits(engine)


@pytest.mark.slow  # two programs agree to the bit only where both are fully optimized
@pytest.mark.parametrize("optimizer", ["sgd", "lion", "adafactor"])
def test_jax_ends_in_the_same_bits_layer_by_layer_where_no_rule_divides_by_what_is_small(
    optimizer: str, moving: None
) -> None:
    changes = {"optimize.optimizer": optimizer, "train.ema_decay": 0.9}
    plain, expected = stepped("jax", changes)
    engine, found = stepped("jax", changes | {KEY: "pinned"})
    assert step_memory(engine).output_size_in_bytes >= 4 * engine.trainable_parameters
    assert found == expected
    assert_same(engine, plain)


def waits(engine: Any) -> bool:
    """Whether all moments are in pinned memory."""
    paths = jax.tree_util.tree_flatten_with_path(engine._train_state.optimizer)[0]
    moments = [x for path, x in paths if jax_offload._is_moment(path)]
    return {x.sharding.memory_kind for x in moments} == {jax_offload.PINNED}


@pytest.mark.parametrize("value", ["compressed", "pinned"])
def test_weights_and_moments_are_rounded_alike_whether_the_state_moves_or_not(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer, of each the bits that a stack's own layer has."""
    changes = {KEY: value, "train.grad_clip": 0.0, "optimize.optimizer": "lion"}
    changes |= {"optimize.precision": "bf16-sr"} if value == "pinned" else {}
    plain, expected = stepped("jax", changes)
    monkeypatch.setattr(jax_offload, "same_memory", lambda kind: False)
    engine, found = stepped("jax", changes)
    assert waits(engine)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    state, same, many = adapted.State(plain), 0, 0
    for name, array in adapted.State(engine).tensors.items():
        moment = array.dtype == jax.numpy.bfloat16
        if moment if value == "compressed" else array.ndim == 2 and not name.startswith("optim"):
            same += int((array == state.tensor(name)).sum())
            many += array.size
    assert many > 0.9 * engine.trainable_parameters
    assert same > 0.99 * many  # other random bits would differ in half of them


def test_a_skipped_step_changes_nothing_but_the_scale(moving: None) -> None:
    changes = {KEY: "pinned", "optimize.precision": "fp16", "train.ema_decay": 0.9}
    plan = plan_with("jax", changes)
    engine = built(plan)
    engine.train_step(batch(plan, 0))
    scale = np.array([2.0**60, 0.0, 0.0], np.float32)  # overflows
    engine._train_state = engine._train_state._replace(precision=jax.numpy.asarray(scale))
    before = adapted.State(engine).tensors
    engine.train_step(batch(plan, 1))
    assert not np.isfinite(engine.take_metrics()[-1].gradient_norm)
    for name, array in adapted.State(engine).tensors.items():
        if name not in ("optimizer.step", loss_scale.NAME):
            np.testing.assert_array_equal(array, before[name], name)
    assert engine._train_state.precision[0] == 2.0**59


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_on_a_cpu_nothing_moves_and_nothing_is_said_to_be_saved(backend: str) -> None:
    engine, found = stepped(backend, {KEY: "pinned"})
    assert found == stepped(backend, {})[1]
    plan = plan_with(backend, {KEY: "pinned"})
    state = step_of(plan, MODELS["llama"], "cpu").state
    assert state == step_of(plan_with(backend, {}), MODELS["llama"], "cpu").state
    assert state.resident
    assert "everything else" in " ".join(engine.platform_lines())


def test_torch_holds_the_state_of_two_weights_at_a_time(moving: None) -> None:
    plan = plan_with("torch", {KEY: "cpu"})
    engine = built(plan)
    most = [0]
    fetch = torch_offload.HostState._fetch

    def counted(self: Any, index: int) -> None:
        fetch(self, index)
        held = sum(t.nbytes for state in self._fetched.values() for t in state.values())
        most.append(held)

    torch_offload.HostState._fetch = counted  # type: ignore[method-assign]
    try:
        engine.train_step(batch(plan, 0))
    finally:
        torch_offload.HostState._fetch = fetch  # type: ignore[method-assign]
    state = step_of(plan, MODELS["llama"], "gpu").state
    assert max(most) == state.at_step
    assert state.host == sum(
        t.nbytes for n, t in engine.saved.named() if n.startswith("optimizer.")
    )
    assert state.at_step < state.host / 4


@pytest.mark.parametrize(
    ("optimizer", "more"),
    spread(
        ["adamw", "lion", "adamw-8bit", "adamw8-all"],
        [{}, IN_BACKWARD, ROUNDED, ROUNDED | IN_BACKWARD],
    ),
    ids=str,
)
def test_every_phase_is_priced_as_it_is_traced(optimizer: str, more: dict[str, Any]) -> None:
    a = Architecture(
        family="llama", vocab_size=2000, hidden_size=256, layers=2, heads=4, kv_heads=2, head_size=64,
        intermediate_size=760, max_positions=512, tied_embeddings=False,
    )  # fmt: skip
    peaks = []
    for value in ("none", "pinned"):
        plan = plan_with("torch", {"optimize.optimizer": optimizer, KEY: value, **more})
        case = Case(a, plan, "gpu")
        expected, found = estimated(case), traced(case)
        for phase in TRAINING:
            assert expected[phase] == pytest.approx(found[phase], rel=0.03), (value, phase)
        peaks.append(max(found[phase] for phase in TRAINING))
    assert peaks[0] - peaks[1] > step_of(plan, a, "gpu").state.host / 3


def test_jax_holds_the_state_of_two_layers_at_a_time(
    moving: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_with("jax", {KEY: "pinned"})
    engine = built(plan)
    engine.train_step(batch(plan, 0))
    before, most = set(), []
    fetch = jax_offload.OffloadedStep._fetch

    def here() -> dict[int, int]:
        arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind != jax_offload.PINNED]
        return {id(x): x.nbytes for x in arrays}

    def counted(self: Any, leaves: Any, visit: Any) -> Any:
        if not most:
            before.update(here())
        found = fetch(self, leaves, visit)
        most.append(sum(nbytes for key, nbytes in here().items() if key not in before))
        return found

    monkeypatch.setattr(jax_offload.OffloadedStep, "_fetch", counted)
    engine.train_step(batch(plan, 1))
    state = step_of(plan, MODELS["llama"], "gpu").state
    weights = sum(x.nbytes for x in engine._train_state.weights.values())
    assert len(most) > len(engine._train_state.weights)
    # Updated stacks are new arrays in the place of donated ones.
    assert max(most) <= state.at_step + weights
    assert most[1] <= state.at_step
    assert state.at_step < state.host / 4


def test_xla_plans_the_state_outside_the_device(moving: None) -> None:
    place = trace_targets.target("", "cpu")
    needed = {}
    for value in ("none", "pinned"):
        plan = plan_with("jax", {KEY: value})
        needed[value] = planned_step(plan, MODELS["llama"], place)
    state = step_of(plan, MODELS["llama"], "gpu").state
    assert needed["pinned"].host == pytest.approx(state.host, rel=0.01)
    saved = needed["none"].needed - needed["pinned"].needed
    assert saved > 0.9 * (state.host - state.at_step)


def test_jax_refuses_host_memory_that_is_not_pinned() -> None:
    with pytest.raises(PlanError, match="only host memory that is pinned"):
        plan_with("jax", {KEY: "cpu"})
