"""What each of several devices holds, by the formula."""

from __future__ import annotations

from typing import Any

import pytest

from memconsole.memory.formula import memory_table
from memconsole.memory.table import MemoryTable
from memconsole.plan import catalog
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, replace

GIB = 2**30
CARD = Budget(
    name="card", kind="gpu", memory_label="HBM", total_bytes=80 * GIB, usable_bytes=79 * GIB, why="test",
    bandwidth_bytes_per_second=3e12, peak_flops={"fp32": 6e13, "bf16": 1e15},
)  # fmt: skip
LARGE: dict[str, Any] = {
    "model.name": "llama-3.1-8b",
    "device.name": "h100-80gb",
    "train.batch_size": 1,
    "data.sequence_length": 2048,
    "optimize.gradient_checkpointing": "full",
}


def table(changes: dict[str, Any]) -> MemoryTable:
    plan = replace(Plan(), LARGE | changes)
    return memory_table(plan, catalog.model(plan), CARD)


def component(found: MemoryTable, name: str, phase: str) -> int:
    return next(c for c in found.components if c.name == name).at(phase)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_device_holds_its_share_and_the_blocks_that_compute(precision: str) -> None:
    split = table({"device.count": 8, "optimize.sharding": "fsdp", "optimize.precision": precision})
    model = catalog.architecture(replace(Plan(), LARGE))
    whole = sum(p.size for p in model.parameters())
    outside = sum(p.size for p in model.parameters() if p.layer is None)
    block = (whole - outside) // model.layers
    width = 4 if precision == "fp32" else 2
    share = component(split, "weights", "checkpoint")
    assert share == -(-4 * whole // 8)
    for phase in ("forward", "loss", "backward"):
        assert component(split, "weights", phase) == share + width * (2 * block + outside)
    assert component(split, "optimizer state", "optimizer step") == -(-8 * whole // 8)


def test_more_devices_hold_less_each() -> None:
    split = {"optimize.sharding": "fsdp", "optimize.precision": "bf16"}
    peaks = [table(split | {"device.count": n}).peak_bytes for n in (2, 4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.5 * peaks[-1]


def test_the_gradients_of_copies_stay_in_their_buffers() -> None:
    copied = table({"device.count": 2, "optimize.sharding": "ddp"})
    alone = table({})
    gradients = component(alone, "gradients", "optimizer step")
    for phase in ("forward", "loss", "evaluation", "checkpoint"):
        assert component(copied, "gradients", phase) == gradients, phase
        assert component(alone, "gradients", phase) == 0, phase
    accumulated = table({"optimize.accumulation_steps": 2})
    assert component(accumulated, "gradients", "evaluation") == 0


def test_tables_of_other_counts_are_not_those_that_were_remembered() -> None:
    changes = {"optimize.sharding": "fsdp", "optimize.gradient_checkpointing": "none"}
    backward = [table(changes | {"device.count": n}).phases["backward"] for n in (2, 8, 2)]
    assert backward[0] == backward[2] > backward[1]
