"""Evaluation in batches of its own size: the same loss, priced as a phase, and no logits kept."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from memconsole.memory.activations import jax_step, torch_step
from memconsole.memory.exact import affine
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch
from memconsole_trainer.schedule import learning_rate
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

BACKENDS = ("torch", "jax")
ARCHITECTURE = msgspec.structs.replace(tiny_models.ARCHITECTURES["gemma3"], vocab_size=100)
ROWS, LENGTH = 6, 24


def plan_with(**changes: Any) -> Plan:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(
        Plan(),
        {
            "device.name": "cpu", "data.sequence_length": LENGTH, "train.batch_size": 2,
            "train.sample_tokens": 0, **keys,
        },
    )  # fmt: skip


def batches(rows: int) -> list[Batch]:
    """The same `ROWS` rows, so many at a time, the last batch short."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 100, (ROWS, LENGTH + 1)).astype(np.int32)
    cut = [tokens[i : i + rows] for i in range(0, ROWS, rows)]
    return [language_batch(t[None, :, :-1], t[None, :, 1:]) for t in cut]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_does_not_depend_on_the_evaluation_batch(backend: str) -> None:
    pytest.importorskip(backend)
    losses = []
    for rows in (None, 1, 4):
        plan = plan_with(backend=backend, train__evaluation_batch_size=rows)
        engine = engine_factory(backend)(plan, None)
        engine.build(plan, ARCHITECTURE, 10, InitialWeights(ARCHITECTURE, 0))
        total = engine.evaluate(iter(batches(plan.evaluation_batch)))
        assert total.weight == ROWS * LENGTH
        losses.append(total.mean)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def priced(plan: Plan, kind: str) -> dict[str, int]:
    """Each phase's largest moment by formula."""
    timeline = jax_step if plan.backend == "jax" else torch_step
    found: dict[str, int] = {}
    for moment in timeline.moments(step_of(plan, ARCHITECTURE, kind)):
        found[moment.phase] = max(found.get(moment.phase, 0), moment.total)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_larger_evaluation_batch_raises_the_evaluation_phase_alone(
    backend: str, kind: str
) -> None:
    same, larger = (
        priced(plan_with(backend=backend, train__evaluation_batch_size=n), kind) for n in (2, 256)
    )
    rows = 254 * LENGTH
    assert larger["evaluation"] - same["evaluation"] > rows * 4 * ARCHITECTURE.hidden_size
    for phase in ("forward", "loss", "backward", "optimizer step", "checkpoint"):
        assert larger[phase] == same[phase]
    assert max(larger, key=larger.__getitem__) == "evaluation"


@pytest.mark.parametrize(("rows", "length"), [(1, 48), (7, 48), (7, 96), (40, 64)])
def test_the_torch_timeline_and_formula_are_what_a_trace_finds(rows: int, length: int) -> None:
    pytest.importorskip("torch")
    from memconsole_torch.tracing import trace, trace_step

    plan = plan_with(train__evaluation_batch_size=rows, data__sequence_length=length)
    found = trace_step.trace(plan, ARCHITECTURE).peaks
    timeline = trace.record(plan, ARCHITECTURE, "cpu").timeline
    exact = affine.evaluate(timeline, plan.train.batch_size, length, plan.evaluation_batch)
    for phase, peak in found.items():
        assert exact.phases[phase].total_bytes == pytest.approx(peak, rel=1e-3), phase
    assert priced(plan, "cpu")["evaluation"] == pytest.approx(found["evaluation"], rel=0.03)


def test_a_torch_evaluation_holds_as_much_after_six_batches_as_after_two() -> None:
    pytest.importorskip("torch")
    from memconsole_torch.tracing import trace_step

    plan, peaks = plan_with(), []
    for count in (2, 6):
        with patch.object(trace_step, "EVALUATED", count):
            peaks.append(trace_step.trace(plan, ARCHITECTURE).peaks["evaluation"])
    assert peaks[1] - peaks[0] <= 16 * 4, "a scalar per batch and no more"


def test_xla_plans_more_for_a_larger_evaluation_batch_and_returns_two_numbers() -> None:
    jax = pytest.importorskip("jax")
    from memconsole_jax.compiled.programs import Programs

    temporary = []
    for rows in (2, 8, 64):
        plan = plan_with(backend="jax", train__evaluation_batch_size=rows)
        programs = Programs.of(plan, ARCHITECTURE, "cpu", jax.devices("cpu")[0])
        memory = programs.lower_evaluate().compile().memory_analysis()
        assert memory.output_size_in_bytes == 8
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] < temporary[1] < temporary[2]


def test_the_learning_rate_follows_the_effective_batch_where_it_shall() -> None:
    def peak(scale: str) -> float:
        plan = plan_with(
            optimize__accumulation_steps=8,
            train__scale_learning_rate=scale,
            train__reference_batch=4,
            train__learning_rate=1e-3,
            train__warmup_steps=2,
        )
        return learning_rate(1, plan, 100)

    assert peak("none") == pytest.approx(1e-3)
    assert peak("sqrt") == pytest.approx(2e-3)
    assert peak("linear") == pytest.approx(4e-3)
