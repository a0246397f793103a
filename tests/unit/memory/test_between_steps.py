"""What a run on a CPU holds where it does not train: evaluating, saving, compiling."""

from __future__ import annotations

from typing import Any

import pytest

from memconsole.memory.coefficients import runtime
from memconsole.memory.formula import memory_table
from memconsole.memory.state.data import held_out_bytes, waiting_bytes
from memconsole.memory.table import MemoryTable
from memconsole.plan import catalog
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, replace

GIB = 2**30
HOST = Budget(
    name="CPU", kind="cpu", memory_label="host RAM", total_bytes=64 * GIB, usable_bytes=64 * GIB, why="test",
    bandwidth_bytes_per_second=5e10, peak_flops={"fp32": 3e11},
)  # fmt: skip


def table(backend: str, changes: dict[str, Any] | None = None) -> MemoryTable:
    plan = replace(Plan(), {"backend": backend, "device.name": "cpu"} | (changes or {}))
    return memory_table(plan, catalog.model(plan), HOST)


def own(found: MemoryTable, phase: str) -> int:
    return next(c for c in found.components if c.name == "runtime").at(phase)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_training_freed_is_gone_when_a_run_saves(backend: str) -> None:
    costs = runtime(backend, "cpu")
    for heap in ("fast", "tight", "jemalloc"):
        found = table(backend, {"optimize.heap": heap})
        assert own(found, "checkpoint") == costs.settled_bytes
    assert own(table(backend), "backward") > own(table(backend), "checkpoint")


def test_what_a_small_step_left_is_no_more_than_its_peak() -> None:
    small = {"train.batch_size": 1, "data.sequence_length": 16, "model.target_params": 100_000}
    found = table("torch", small)
    assert own(found, "checkpoint") < (runtime("torch", "cpu").settled_bytes or 0)
    assert found.phases["checkpoint"] == max(
        found.phases[p] for p in ("forward", "loss", "backward")
    )
    assert own(found, "backward") > 0


def test_the_heap_keeps_no_more_of_an_evaluation_than_it_frees() -> None:
    fast, tight = (table("torch", {"optimize.heap": heap}) for heap in ("fast", "tight"))
    freed = tight.phases["evaluation"] - tight.phases["checkpoint"]
    assert 0 < own(fast, "evaluation") - own(tight, "evaluation") <= freed


EVALUATED = [
    ({"train.evaluation_batch_size": 64, "train.batch_size": 4}, 99.0),
    ({"train.evaluation_batch_size": 128}, 209.9),
    ({"train.evaluation_batch_size": 256, "train.batch_size": 1}, 419.3),
    (
        {"train.evaluation_batch_size": 256, "train.batch_size": 2, "data.sequence_length": 64},
        218.8,
    ),
    (
        {
            "train.evaluation_batch_size": 128, "train.batch_size": 2, "data.vocab_size": 8000,
            "model.target_params": 3_000_000,
        },
        263.6,
    ),
    (
        {
            "train.evaluation_batch_size": 64, "train.batch_size": 2, "optimize.precision": "bf16",
            "model.target_params": 5_000_000,
        },
        212.1,
    ),
]  # fmt: skip
"""Plans whose evaluation has more rows than a step, and MiB at their peak in runs of 12 and 15 steps with six evaluations."""


@pytest.mark.parametrize(("changes", "measured"), EVALUATED)
def test_an_evaluation_of_many_rows_keeps_a_heap_of_its_own(
    changes: dict[str, Any], measured: float
) -> None:
    found = table("torch", changes)
    assert found.peak_phase == "evaluation"
    low, high = (size / 2**20 for size in found.band_bytes)
    assert low < measured < high
    assert found.peak_bytes / 2**20 == pytest.approx(measured, rel=0.3)


def test_a_compiler_that_takes_more_than_training_sets_the_peak_of_the_host() -> None:
    costs = runtime("jax", "cpu")
    small, large = table("jax"), table("jax", {"train.batch_size": 128})
    assert small.host_bytes == small.host.compiling > small.host.training
    assert large.host_bytes == large.host.training > large.host.compiling
    more = small.host.more(2**30)
    assert more.peak == more.training == small.host.training + 2**30
    assert small.host.compiling - costs.compiling_bytes >= costs.host_bytes


def test_programs_on_disk_need_no_compiler() -> None:
    costs, found = runtime("jax", "cpu"), table("jax").host
    assert costs.compiler_code_bytes > 0
    assert found.compiled().peak == found.training - costs.compiler_code_bytes < found.peak
    assert table("torch").host.compiled().peak == table("torch").host_bytes


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_task_that_reads_no_text_does_not_load_what_text_needs(backend: str) -> None:
    costs = runtime(backend, "cpu")
    found = table(backend, {"model.name": "lqr", "data.sequence_length": 32})
    rows = found.host.training - found.peak_bytes - costs.host_bytes + costs.text_bytes
    plan = replace(Plan(), {"backend": backend, "model.name": "lqr", "data.sequence_length": 32})
    model = catalog.model(plan)
    assert rows == waiting_bytes(plan, model) + held_out_bytes(plan, model)
    assert costs.text_bytes > 0
