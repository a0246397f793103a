"""Remedies for a plan that does not fit, and the largest batch and sequence that do."""

from __future__ import annotations

import msgspec
import pytest

from memconsole.memory.answers.advice import (
    ORDER,
    largest_micro_batch,
    largest_sequence_length,
    remedies,
)
from memconsole.memory.estimate import architecture_of, table_of
from memconsole.plan import plan as plans
from memconsole.plan.budget import Budget
from memconsole.plan.plan import Plan

GIB = 2**30
PLAN = plans.replace(
    Plan(), {"model.name": "smollm2-135m", "data.sequence_length": 1024, "train.batch_size": 16}
)


def device(usable: int, kind: str = "gpu") -> Budget:
    return Budget(
        name=kind,
        kind=kind,
        memory_label="VRAM",
        total_bytes=usable,
        usable_bytes=usable,
        why="test",
        bandwidth_bytes_per_second=1e12,
        peak_flops={"fp32": 2e13, "bf16": 1e14},
    )


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_remedy_saves_what_it_says_and_comes_in_the_troubleshooting_order(
    backend: str,
) -> None:
    plan = plans.replace(PLAN, {"backend": backend})
    budget = device(12 * GIB)
    before = table_of(plan, budget)
    assert not before.fits
    found = remedies(plan, budget)
    assert found
    for remedy in found:
        after = table_of(plans.replace(plan, remedy.changes), budget)
        assert remedy.saves_bytes == before.device_bytes - after.device_bytes > 0
        assert remedy.fits == after.fits
    places = [min(ORDER.index(key) for key in r.changes if key in ORDER) for r in found]
    assert places == sorted(places)


def test_a_remedy_that_fits_changes_no_more_than_it_must() -> None:
    budget = device(12 * GIB)
    split = next(r for r in remedies(PLAN, budget) if "optimize.accumulation_steps" in r.changes)
    assert split.fits
    steps = split.changes["optimize.accumulation_steps"]
    assert split.changes["train.batch_size"] * steps == PLAN.train.batch_size
    half = {
        "optimize.accumulation_steps": steps // 2,
        "train.batch_size": 2 * split.changes["train.batch_size"],
    }
    assert not table_of(plans.replace(PLAN, half), budget).fits


def test_a_sized_model_can_be_made_smaller() -> None:
    plan = plans.replace(Plan(), {"model.target_params": 100_000_000, "train.batch_size": 1})
    budget = device(GIB, "cpu")
    assert any("model.target_params" in r.changes for r in remedies(plan, budget))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("gib", [6, 8, 24])
def test_the_largest_batch_fits_and_one_more_row_does_not(backend: str, gib: int) -> None:
    plan = plans.replace(PLAN, {"backend": backend})
    budget = device(gib * GIB)
    rows = largest_micro_batch(plan, budget)
    assert rows is not None
    assert table_of(plans.replace(plan, {"train.batch_size": rows}), budget).fits
    assert not table_of(plans.replace(plan, {"train.batch_size": rows + 1}), budget).fits


def test_the_largest_sequence_fits_and_the_next_does_not_or_has_no_positions() -> None:
    budget = device(8 * GIB)
    length = largest_sequence_length(PLAN, budget)
    assert length is not None
    assert length % 8 == 0
    assert table_of(plans.replace(PLAN, {"data.sequence_length": length}), budget).fits
    longer = plans.replace(PLAN, {"data.sequence_length": length + 8})
    assert not table_of(longer, budget).fits
    roomy = msgspec.structs.replace(budget, usable_bytes=4096 * GIB)
    short = plans.replace(PLAN, {"train.batch_size": 1})
    assert largest_sequence_length(short, roomy) == architecture_of(short).max_positions


def test_where_not_even_one_row_fits_there_is_no_largest_batch() -> None:
    assert largest_micro_batch(PLAN, device(GIB // 2)) is None
    assert largest_sequence_length(PLAN, device(GIB // 2)) is None
