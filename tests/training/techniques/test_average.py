"""The moving average of the weights: right, alone in evaluation and export, resumed exactly, priced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from memconsole.memory.formula import memory_table
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.run_store import create_run
from memconsole_jax.tracing import trace as jax_trace
from memconsole_jax.tracing import trace_targets
from memconsole_torch.tracing import trace_step
from memconsole_trainer.engine import Sampling
from memconsole_trainer.techniques.adapters import trained_parameters
from memconsole_trainer.techniques.average import PREFIX, share
from memconsole_trainer.weights import trained
from memconsole_trainer.weights.export_run import export_run
from tests.training.harness.adapted import MODELS, RANK, State, batch, built, plan_with
from tests.training.harness.runs import attempt, plan, state_hashes

torch.set_num_threads(1)
WHOLE = {"optimize.lora_rank": 0, "optimize.freeze_base": False, "train.ema_decay": 0.8}
ADAPTED = {"optimize.lora_rank": RANK, "optimize.freeze_base": True}
COMBINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": ADAPTED,
    "bf16-sr accumulated": {"optimize.precision": "bf16-sr", "optimize.accumulation_steps": 2, "train.batch_size": 2},
    "fp16 checkpointed": {"optimize.precision": "fp16", "optimize.gradient_checkpointing": "full"},
    "8-bit offloaded": {"optimize.optimizer": "adamw-8bit", "optimize.optimizer_offload": "pinned"},
}  # fmt: skip
IN_BACKWARD = {"optimize.optimizer_in_backward": True, "train.grad_clip": 0.0}


def averaged(backend: str, **changes: Any) -> Plan:
    return plan_with(backend, WHOLE | changes)


def halves(engine: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights and averages, copied, by canonical name."""
    found = State(engine).tensors.items()
    return (
        {n.removeprefix("model."): a for n, a in found if n.startswith("model.")},
        {n.removeprefix(PREFIX): a for n, a in found if n.startswith(PREFIX)},
    )


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        *((b, c) for b in ("torch", "jax") for c in COMBINED.values()),
        ("torch", IN_BACKWARD),
    ],
    ids=[*(f"{b} {c}" for b in ("torch", "jax") for c in COMBINED), "torch in backward"],
)
def test_the_average_is_that_of_its_definition_whatever_trains(
    backend: str, changes: dict[str, Any]
) -> None:
    plan = averaged(backend, **changes)
    engine = built(plan)
    weights, averages = halves(engine)
    assert set(averages) == {p.name for p in trained_parameters(plan, MODELS["llama"])}
    expected = {n: weights[n].astype(np.float64) for n in averages}
    for step in range(5):
        engine.train_step(batch(plan, step))
        weights, averages = halves(engine)
        for name, old in expected.items():
            old += (1 - min(0.8, (1 + step) / (10 + step))) * (weights[name] - old)
    for name, array in averages.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, expected[name], rtol=2e-6, atol=1e-8, err_msg=name)
    moved = max(np.abs(averages[n] - weights[n].astype(np.float32)).max() for n in averages)
    assert moved > 1e-4


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_step_that_fp16_skips_leaves_the_average_as_it_was(backend: str) -> None:
    plan = averaged(backend, **{"optimize.precision": "fp16"})
    engine = built(plan)
    engine.train_step(batch(plan, 0))
    before = halves(engine)
    if backend == "torch":
        engine._scale.state[0] = 2.0**100
    else:
        huge = engine._train_state.precision.at[0].set(2.0**100)
        engine._train_state = engine._train_state._replace(precision=huge)
    engine.train_step(batch(plan, 1))
    assert engine.take_metrics()[-1].skipped
    for old, new in zip(before, halves(engine), strict=True):
        for name, array in old.items():
            np.testing.assert_array_equal(array, new[name], err_msg=name)


class Given:
    """A source of these tensors."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_evaluation_and_sampling_take_the_average_and_training_goes_on_with_the_weights(
    backend: str,
) -> None:
    plan = averaged(backend)
    engine, undisturbed = built(plan), built(plan)
    for step in range(3):
        engine.train_step(batch(plan, step))
        undisturbed.train_step(batch(plan, step))
    weights, averages = halves(engine)
    plain = built(replace(plan, {"train.ema_decay": 0.0}), weights=Given(weights | averages))
    raw = built(replace(plan, {"train.ema_decay": 0.0}), weights=Given(weights))
    rows = batch(plan, 7)
    assert engine.evaluate([rows]).loss == pytest.approx(plain.evaluate([rows]).loss, rel=1e-6)
    assert abs(engine.evaluate([rows]).loss - raw.evaluate([rows]).loss) > 1e-3
    assert engine.generate([1, 2], 8, Sampling(1.0, seed=5)) == plain.generate(
        [1, 2], 8, Sampling(1.0, seed=5)
    )
    for step in range(3, 5):
        engine.train_step(batch(plan, step))
        undisturbed.train_step(batch(plan, step))
    ours, theirs = State(engine).tensors, State(undisturbed).tensors
    assert all(np.array_equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize(
    ("backend", "changes"), [("torch", {}), ("torch", ADAPTED), ("jax", {})], ids=str
)
def test_a_run_resumes_its_average_exactly_and_exports_it(
    backend: str, changes: dict[str, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = {"train__max_steps": 6, "train__ema_decay": 0.9, "model__weights": "random"}
    wanted = replace(plan(text, backend, **settings), changes)
    whole, broken = create_run(wanted), create_run(wanted)
    assert attempt(whole) == 0
    assert attempt(broken, lambda phase, step: step >= 3) == 75
    assert attempt(broken) == 0
    assert state_hashes(broken) == state_hashes(whole)
    assert any(name.startswith("ema-") for name in state_hashes(whole))
    found = trained.read(whole.path)
    names = [n.removeprefix(PREFIX) for n in found.checkpoint.names() if n.startswith(PREFIX)]
    if not changes:
        for name in names:
            average = found.checkpoint.tensor(PREFIX + name)
            np.testing.assert_array_equal(found.tensor(name), average)
            assert not np.array_equal(average, found.checkpoint.tensor(f"model.{name}"))
    else:
        matrix = next(n for n in names if n.endswith("lora_b")).removesuffix(".lora_b")
        a, b = (found.checkpoint.tensor(f"{PREFIX}{matrix}.lora_{x}") for x in "ab")
        difference = found.tensor(f"{matrix}.weight") - found._base.tensor(f"{matrix}.weight")
        np.testing.assert_allclose(difference, 2 * b @ a, atol=1e-7)
    export_run(found, tmp_path / "out")


@pytest.mark.parametrize("changes", [{}, ADAPTED], ids=["whole", "lora"])
def test_the_table_and_both_tracers_see_an_fp32_copy_of_the_trained_weights(
    changes: dict[str, Any],
) -> None:
    architecture = msgspec.structs.replace(MODELS["llama"], vocab_size=2000)
    budget = Budget(
        name="cpu", kind="cpu", memory_label="host RAM", total_bytes=2**40, usable_bytes=2**40, why=""
    )  # fmt: skip
    for backend in ("torch", "jax"):
        plan = averaged(backend, **changes)
        without = replace(plan, {"train.ema_decay": 0.0})
        size = 4 * sum(p.size for p in trained_parameters(plan, architecture))
        tables = [memory_table(p, architecture, budget) for p in (plan, without)]
        for phase in tables[0].phases:
            assert tables[0].phases[phase] - tables[1].phases[phase] == size
        if backend == "torch":
            peaks = [trace_step.trace(p, architecture, "cpu").peaks for p in (plan, without)]
            assert {p: peaks[0][p] - peaks[1][p] for p in peaks[1]} == dict.fromkeys(peaks[1], size)
        else:
            place = trace_targets.target("", "cpu")
            exact = [jax_trace.planned(p, architecture, place).phases for p in (plan, without)]
            for phase in exact[1]:
                more = exact[0][phase].total_bytes - exact[1][phase].total_bytes
                assert size <= more <= 1.02 * size + 4096, phase


def test_early_steps_forget_the_first_weights_and_later_ones_follow_the_decay() -> None:
    plan = replace(Plan(), {"train.ema_decay": 0.99})
    assert share(plan, 0) == pytest.approx(0.9)
    assert share(plan, 90) == pytest.approx(1 - 91 / 100)
    assert share(plan, 100_000) == pytest.approx(0.01)
