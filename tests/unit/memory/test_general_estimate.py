"""Estimates of a task without formulas of its own: exact state, every toggle, fits and advice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memconsole.memory.activations import general
from memconsole.memory.answers.advice import (
    largest_micro_batch,
    largest_sequence_length,
    remedies,
)
from memconsole.memory.answers.solve import fit
from memconsole.memory.coefficients import runtime as costs_of
from memconsole.memory.estimate import estimate, model_of, table_of
from memconsole.memory.exact.sharpen import KnownExact, sharpened
from memconsole.memory.exact.timeline import Exact, ExactPhase
from memconsole.memory.formula import PHASES
from memconsole.memory.seconds import step_flops
from memconsole.memory.state.data import waiting_bytes
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.table import Tier
from memconsole.memory.tracers.ahead import prepared
from memconsole.memory.tracers.question import traced_plan
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.data.rows import row_bytes, training_rows
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.tasks import REGRESSION, Input, task_of
from memconsole.plan.toggles.optimizations import BY_KEY
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.engine import Batch
from tests.unit.window_file import window_file

KINDS = {"torch": ("cpu", "gpu", "rocm", "apple"), "jax": ("cpu", "gpu", "rocm", "tpu")}
PARAMETERS = 208_774
ROW = 4 * (32 * 19 + 6 + 6)


def device(kind: str, usable: int = 2**34) -> Budget:
    return Budget(
        name=kind,
        kind=kind,
        memory_label="memory",
        total_bytes=2**34,
        usable_bytes=usable,
        why="test",
        bandwidth_bytes_per_second=1e11,
        peak_flops={"fp32": 1e13, "bf16": 1e14},
    )


@pytest.fixture(scope="module", autouse=True)
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Pricing reads no rows, only their number and widths."""
    folder = tmp_path_factory.mktemp("windows")
    window_file(folder / "windows.h5", length=128)
    window_file(folder / "large.h5", rows=50)
    with contextlib.chdir(folder):
        yield folder


def regression(backend: str = "torch", **changes: Any) -> Plan:
    own = {"backend": backend, "model.name": "lqr", "data.sequence_length": 32}
    own |= {"data.source": "windows.h5"} | {k.replace("__", "."): v for k, v in changes.items()}
    return plans.replace(Plan(), own)


@st.composite
def settings_of_any_toggle(draw: st.DrawFn) -> tuple[Plan, str]:
    backend = draw(st.sampled_from(["torch", "jax"]))
    plan = regression(backend)
    refused = task_of(plan).not_applicable(plan)
    for key in draw(st.lists(st.sampled_from(sorted(BY_KEY)), unique=True, max_size=6)):
        row = BY_KEY[key]
        if row.key in refused:
            continue
        changed = row.apply(plan, draw(st.sampled_from(row.values(plan))))
        try:
            check(changed)
        except PlanError:
            continue
        plan = changed
    return plan, draw(st.sampled_from(KINDS[backend]))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_state_and_data_are_exact(backend: str) -> None:
    table = table_of(regression(backend), device("cpu"))
    parts = {c.name: c for c in table.components}
    assert list(table.phases) == list(PHASES)
    step = "optimizer step"
    assert parts["weights"].at(step) == parts["gradients"].at(step) == 4 * PARAMETERS
    assert parts["optimizer state"].at(step) == 8 * PARAMETERS
    assert parts["data"].at("forward") == 16 * ROW
    for phase, total in table.phases.items():
        assert sum(c.at(phase) for c in table.components) == total
    assert table.phases["checkpoint"] < table.phases["forward"] < table.phases["backward"]


def test_only_what_the_rule_counts_widens_the_band() -> None:
    """Weights and state are exact; the rest may be off by a factor of two."""

    def width(rows: int) -> float:
        plan = regression("jax", train__batch_size=rows)
        low, high = general.bounds(general.moments(step_of(plan, model_of(plan), "gpu")), 0)
        return high - low

    assert width(1) < width(16) < width(1024)
    assert "factor of two" in table_of(regression("jax"), device("cpu")).band_from


@dataclass
class NoRows:
    """The `Rows` of an empty dataset: the queue is as long as for a full one."""

    shuffle_buffer: int
    row_bytes: int = ROW
    at_hand: bool = True

    def epoch(self, epoch: int) -> Any:
        raise ValueError("there are no rows")

    def after(self, iterator: Any) -> Any:
        raise NotImplementedError

    def join(self, rows: list[Any]) -> Any:
        raise NotImplementedError

    def batch(self, joined: Any, shape: BatchShape) -> tuple[Batch, int]:
        raise NotImplementedError


@pytest.mark.parametrize("buffer", [1, 10_000, 1_000_000])
def test_rows_that_wait_are_priced_as_host_memory_alone(buffer: int, windows: Path) -> None:
    """The buffer, as far as the file fills it, and the trainer's queue. They are there before the model is built, so that
    a CPU's tensors do not include them either."""
    rows = (windows / "large.h5").stat().st_size // ROW
    plan = regression(data__shuffle_buffer=buffer, data__source="large.h5", optimize__heap="tight")
    queue = BatchStream(NoRows(buffer), BatchShape(1, 16, 32))._queue.maxsize
    expected = (min(rows, buffer) + 16 * queue) * ROW
    few = plans.replace(plan, {"data.shuffle_buffer": 2})
    more = expected - waiting_bytes(few, model_of(few))
    for kind in ("cpu", "gpu"):
        table, fewer = table_of(plan, device(kind)), table_of(few, device(kind))
        runtime = next(c for c in table.components if c.name == "runtime")
        assert runtime.at("forward") == costs_of("torch", kind).workspace_bytes, kind
        assert table.device_bytes == fewer.device_bytes
        assert table.host_bytes - fewer.host_bytes == more


def test_a_task_without_a_shuffle_buffer_holds_all_rows(windows: Path) -> None:
    (windows / "ratings.dat").write_bytes(b"1::2::3::4\n" * 400_000)
    plan = plans.replace(catalog.preset("efficientids"), {"data.source": "ratings.dat"})
    model, each = model_of(plan), plan.train.batch_size * plan.optimize.accumulation_steps
    row = row_bytes(plan, model)
    every = (windows / "ratings.dat").stat().st_size // row
    assert every > plan.data.shuffle_buffer
    queue = BatchStream(NoRows(0, row), BatchShape(1, each, 32))._queue.maxsize
    assert waiting_bytes(plan, model) == (every + queue * each) * row


def test_the_loss_is_priced_by_what_the_head_gives_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target is often smaller than the outputs that it is compared with: one class of thousands."""

    def label(self: object, plan: Plan, model: Model) -> tuple[Input, ...]:
        return (
            Input("windows", "float32", (plan.data.sequence_length, 19)),
            Input("label", "int32", ()),
        )

    def loss() -> int:
        parts = {c.name: c for c in table_of(regression(), device("cpu")).components}
        return parts["logits and loss"].at("loss")

    priced = loss()
    monkeypatch.setattr(type(REGRESSION), "inputs", label)
    assert loss() == priced == 3 * 4 * 16 * 6


def test_rates_count_windows() -> None:
    plan = regression(optimize__accumulation_steps=2)
    found = estimate(plan, device("gpu"))
    assert found.tokens_per_second * found.step_seconds == pytest.approx(32)
    assert found.epoch_minutes is not None
    windows = -(-training_rows(plan, model_of(plan)) // 32) * 32  # in whole steps
    assert found.epoch_minutes * 60 * found.tokens_per_second == pytest.approx(windows), (
        "a window a row"
    )
    row = task_of(plan).flops_per_row(plan, model_of(plan))
    assert step_flops(plan, model_of(plan)) == pytest.approx(3 * 32 * row)
    assert found.peak_tokens_per_second == pytest.approx(1e13 / (3 * row))
    priced = estimate(plan, device("cpu")).savings
    longer = next(s for s in priced if s.key == "data.sequence_length" and s.value == 64)
    assert longer.time_factor > 1, "per window, not per step of it"


@given(chosen=settings_of_any_toggle())
@settings(max_examples=25, deadline=None)
def test_every_toggle_is_priced_or_refused_with_the_tasks_reason(chosen: tuple[Plan, str]) -> None:
    plan, kind = chosen
    budget = device(kind)
    found = estimate(plan, budget)
    reasons = task_of(plan).not_applicable(plan)
    for saving in found.savings:
        row = BY_KEY[saving.key]
        if saving.key in reasons:
            assert (saving.reason, saving.available) == (reasons[saving.key], False)
            assert (saving.saves_bytes, saving.time_factor) == (0, 1.0)
            continue
        changed = row.apply(plan, saving.value)
        try:
            check(changed)
        except PlanError:
            assert not saving.available
            continue
        after = table_of(changed, budget)
        assert saving.saves_bytes == found.table.device_bytes - after.device_bytes
        assert saving.time_factor > 0
        assert saving.saves_bytes > 0 or saving.reason
        assert after.band_bytes[0] <= after.device_bytes <= after.band_bytes[1]
    assert traced_plan(plan, budget).key
    assert not list(prepared(plan, budget)), "there are no blocks to make ready"


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_regression_plan_is_fitted_and_advised_on(backend: str, kind: str) -> None:
    plan = regression(backend, train__batch_size=512)
    needed = table_of(plan, device(kind)).device_bytes
    least = table_of(regression(backend, train__batch_size=8), device(kind)).device_bytes
    budget = device(kind, (needed + least) // 2)
    found = fit(plan, budget)
    assert found.fits
    assert not {c.key for c in found.changes} & set(task_of(plan).not_applicable(plan))
    assert any(r.fits for r in remedies(plan, budget))
    most = largest_micro_batch(plan, budget)
    assert most is not None
    assert 8 <= most.size < 512
    assert table_of(plans.replace(plan, {"train.batch_size": most.size}), budget).fits
    longest = largest_sequence_length(regression(backend), device(kind))
    assert longest is not None
    assert longest.size == 128


def test_a_whole_program_stands_in_its_highest_phase() -> None:
    """XLA tells one number for a step; the table keeps every phase."""
    plan = regression("jax")
    table = table_of(plan, device("gpu"))
    phases = {
        "backward": ExactPhase(total_bytes=2**24, components={"weights": 4 * PARAMETERS}),
        "evaluation": ExactPhase(total_bytes=2**22),
        "checkpoint": ExactPhase(total_bytes=12 * PARAMETERS),
    }
    exact = Exact(phases=phases, program_phase="backward", source="XLA")
    after = sharpened(table, KnownExact(exact=exact))
    assert list(after.phases) == list(PHASES)
    assert after.tier == Tier.EXACT
    assert max(after.phases[p] for p in after.step_phases) == after.phases["backward"]
    assert after.phase_tier("evaluation") == Tier.EXACT


def test_a_tpu_holds_16_bit_copies_of_all_matrices_of_an_fp32_step() -> None:
    found = {}
    for kind, storage in (("gpu", "none"), ("tpu", "none"), ("tpu", "int8")):
        settings = {
            "backend": "jax",
            "optimize.precision": "fp32",
            "optimize.freeze_base": True,
            "optimize.base_storage": storage,
        }
        plan = plans.replace(catalog.preset("efficientids-gemma"), settings)
        step = step_of(plan, catalog.model(plan), kind)
        moments = [m for m in general.moments(step) if m.phase == "loss"]
        found[kind, storage] = moments[0].workspace
        matrices = step.sizes.layers * step.sizes.block_matrices
    assert found["gpu", "none"] == found["tpu", "int8"] == 0  # codes are decoded block by block
    assert found["tpu", "none"] == 2 * matrices
