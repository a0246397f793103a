"""Memory of models that are no decoders: torch's trace of them against real steps, and the formula against the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.exact import affine
from memconsole.memory.exact.sharpen import KnownExact, sharpened
from memconsole.memory.exact.timeline import TracerQuestion
from memconsole.memory.formula import PHASES, moments
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.table import BETWEEN_STEPS, Tier
from memconsole.memory.tracers.exact_book import ExactCache
from memconsole.memory.tracers.question import traced_plan
from memconsole.plan import catalog
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, replace
from memconsole.plan.plan_file import dumps

torch = pytest.importorskip("torch")

from memconsole_torch.models import linear
from memconsole_torch.tracing import trace
from memconsole_trainer.weights.initialize import InitialWeights
from tests.accuracy import torch_exact
from tests.training.harness.grids import spread
from tests.training.harness.step_memory import step_memory
from tests.unit.window_file import window_file

CPU = Budget(
    name="cpu", kind="cpu", memory_label="host RAM", total_bytes=2**34, usable_bytes=2**34, why="test"
)  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"train.batch_size": 1},
    {"optimize.precision": "bf16", "train.batch_size": 64},
    {"optimize.gradient_checkpointing": "full", "train.batch_size": 64},
    {"optimize.gradient_checkpointing": "selective", "train.batch_size": 64},
    {"optimize.accumulation_steps": 4, "optimize.optimizer": "lion"},
    {"train.dropout": 0.1, "train.batch_size": 64},
    {"train.dropout": 0.1, "optimize.gradient_checkpointing": "full"},
)
SIZES: tuple[dict[str, Any], ...] = (
    {"model.layers": 2, "model.features": 5, "model.outputs": 40},
    {"model.hidden_size": 24, "model.heads": 3, "model.layers": 1},
    {"model.hidden_size": 128, "model.heads": 8, "model.layers": 6},
)
RECOMMENDERS: tuple[dict[str, Any], ...] = (
    {"model.embedding_size": 64},
    {"model.embedding_size": 24, "model.adapter_size": 40},
    {"model.embedding_size": 256, "model.adapter_size": 768, "model.items": 300},
    {"model.embedding_size": 64, "optimize.freeze_base": True},
    {"train.dropout": 0.1, "train.batch_size": 64},
)
"""Sizes of the model that the plan chooses, and what is trained."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the few MiB that oneDNN's gradients of weights take for a moment on some processors: no trace has them."""
    torch.set_num_threads(1)
    monkeypatch.setattr(linear, "_is_far_faster", lambda: False)


def plan_with(changes: dict[str, Any]) -> Plan:
    own = {"model.name": "lqr", "data.sequence_length": 32, "device.name": "cpu"}
    return replace(Plan(), own | changes)


def recommending(changes: dict[str, Any]) -> Plan:
    own = {"device.name": "cpu", "data.sequence_length": 16, "train.batch_size": 4}
    return replace(catalog.preset("efficientids"), own | changes)


@pytest.mark.parametrize("changes", [*SETTINGS, *SIZES])
def test_a_trace_of_the_regressor_is_what_real_steps_hold(changes: dict[str, Any]) -> None:
    plan = plan_with(changes)
    model = model_of(plan)
    measured, found = torch_exact.tracked(plan, model), torch_exact.traced(plan, model)
    # MemTracker sees the rows of the micro-batch at work, and not those of the others.
    steps = plan.optimize.accumulation_steps
    waiting = torch_exact.held(plan, model) * (steps - 1) // steps
    for name, truth in measured.items():
        assert found[name] - waiting == pytest.approx(truth, rel=0.002), name


@pytest.mark.parametrize("changes", RECOMMENDERS)
def test_a_trace_of_the_recommender_is_what_real_steps_hold(changes: dict[str, Any]) -> None:
    plan = recommending(changes)
    model = model_of(plan)
    measured, found = torch_exact.tracked(plan, model), torch_exact.traced(plan, model)
    for name, truth in measured.items():
        assert found[name] == pytest.approx(truth, rel=0.002), name


@pytest.mark.parametrize(
    "plan",
    [
        *map(plan_with, (SIZES[0], SETTINGS[-1])),
        recommending(RECOMMENDERS[0]),
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (*map(plan_with, SIZES[1:]), *map(recommending, RECOMMENDERS[1:]))
        ),
    ],
)
def test_xla_plans_what_the_engine_compiles(plan: Plan) -> None:
    pytest.importorskip("jax")
    from memconsole_jax.engine import create
    from memconsole_jax.tracing import trace, trace_targets

    plan = replace(plan, {"backend": "jax"})
    model = model_of(plan)
    exact = trace.planned(plan, model, trace_targets.target("", "cpu"))
    engine = create(plan, None)
    engine.build(plan, model, 10, InitialWeights(model, 0))
    own = step_memory(engine)
    needed = own.argument_size_in_bytes + own.output_size_in_bytes - own.alias_size_in_bytes
    assert exact.phases[exact.program_phase].total_bytes == needed + own.temp_size_in_bytes


@pytest.mark.parametrize("kind", ["cpu", "gpu", "apple"])
def test_one_timeline_holds_for_every_batch_and_length(kind: str) -> None:
    plan = plan_with({})
    model = model_of(plan)
    timeline = trace.record(plan, model, kind).timeline
    assert timeline.only is None
    for batch, length in ((3, 8), (64, 32), (200, 128)):
        other = replace(plan, {"train.batch_size": batch, "data.sequence_length": length})
        assert affine.covers(timeline, other, model, kind)
        own = trace.record(other, model, kind)
        expected = affine.evaluate(own.timeline, batch, length)
        assert affine.evaluate(timeline, batch, length).phases == expected.phases
    rows = [moment.total[affine.TERMS.index("B")] for moment in timeline.phases["loss"]]
    assert any(rows), "outputs and targets have so many numbers per row"
    alone = replace(plan, {"train.batch_size": 1})
    assert not affine.covers(timeline, alone, model, kind)


@pytest.mark.parametrize(
    ("changes", "kind"),
    spread(
        [*SETTINGS, *SIZES, {"optimize.activation_offload": True, "train.batch_size": 64}],
        ["cpu", "gpu", "apple"],
    ),
)
def test_the_formula_of_the_regressor_is_near_its_trace(changes: dict[str, Any], kind: str) -> None:
    estimated, traced = both_peaks(plan_with(changes), kind)
    assert estimated == pytest.approx(traced, rel=0.04)


@pytest.mark.parametrize(
    ("changes", "kind"),
    spread(
        [
            {},
            {"optimize.precision": "bf16", "optimize.freeze_base": True},
            {"optimize.freeze_base": True, "optimize.gradient_checkpointing": "full"},
            {"optimize.precision": "bf16", "optimize.gradient_checkpointing": "selective"},
            {"model.items": 20_000, "optimize.accumulation_steps": 2},
            {"model.items": 20_000, "model.adapter_size": 256, "train.batch_size": 4},
        ],
        ["gpu", "cpu", "apple"],
    ),
)
def test_the_formula_of_the_recommender_is_near_its_trace(
    changes: dict[str, Any], kind: str
) -> None:
    own = {"data.sequence_length": 64, "train.batch_size": 64, "model.items": 300}
    estimated, traced = both_peaks(recommending(own | changes), kind)
    assert estimated == pytest.approx(traced, rel=0.03)


def both_peaks(plan: Plan, kind: str) -> tuple[int, int]:
    """The largest moment of a step, by formula and as traced."""
    model = model_of(plan)
    timeline = trace.record(plan, model, kind).timeline
    exact = affine.evaluate(timeline, plan.train.batch_size, plan.data.sequence_length)
    steps = [m for m in moments(step_of(plan, model, kind)) if m.phase not in BETWEEN_STEPS]
    traced = [p for name, p in exact.phases.items() if name not in BETWEEN_STEPS]
    return max(m.total for m in steps), max(phase.total_bytes for phase in traced)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "changes", [{"train.batch_size": 64}, {"model.items": 20_000, "model.clusters": 140}]
)
def test_an_evaluation_of_a_recommender_takes_no_more_than_the_rule_says(
    changes: dict[str, Any], kind: str
) -> None:
    """Of rows in which all positions have a target."""
    plan = recommending({"data.sequence_length": 64, "train.batch_size": 16} | changes)
    model = model_of(plan)
    timeline = trace.record(plan, model, kind).timeline
    exact = affine.evaluate(timeline, plan.train.batch_size, plan.data.sequence_length)
    found = moments(step_of(plan, model, kind))
    estimated = max(moment.total for moment in found if moment.phase == "evaluation")
    assert estimated / 2 < exact.phases["evaluation"].total_bytes <= 1.01 * estimated


def test_a_table_with_traced_numbers_has_every_phase_and_every_part(tmp_path: Path) -> None:
    windows = window_file(tmp_path / "windows.h5", length=128)
    plan = plan_with({"data.source": str(windows)})
    answer = trace.Tracer().answer(TracerQuestion(id=1, plan=dumps(plan), kind="cpu"))
    assert answer.exact is not None, answer.problem
    table = sharpened(table_of(plan, CPU), KnownExact(exact=answer.exact))
    assert list(table.phases) == list(PHASES)
    assert all(table.phase_tier(phase) == Tier.EXACT for phase in PHASES)
    assert table.tier == Tier.EXACT
    step = {c.name: c.at("optimizer step") for c in table.components}
    assert step["weights"] == step["gradients"] == 4 * 208_774
    assert sum(c.at(table.peak_phase) for c in table.components) == table.peak_bytes
    low, high = table_of(plan, CPU).band_bytes
    assert low <= table.device_bytes <= high


def test_an_answer_is_found_again_at_other_sizes_and_not_for_another_plan() -> None:
    plan, knowledge = plan_with({}), ExactCache()
    made = trace.record(plan, model_of(plan), "cpu").timeline
    knowledge.keep(traced_plan(plan, CPU), None, made)
    larger = replace(plan, {"train.batch_size": 100, "data.sequence_length": 96})
    known = knowledge.known(traced_plan(larger, CPU))
    assert known is not None
    backward = known.exact.phases["backward"].total_bytes
    assert backward > 10 * made.phases["checkpoint"][0].total[0]
    other = replace(plan, {"optimize.gradient_checkpointing": "full"})
    assert knowledge.known(traced_plan(other, CPU)) is None
