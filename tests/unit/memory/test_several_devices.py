"""What each of several devices holds, by the formula."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memconsole.memory.activations.jax_gathered import Gathered
from memconsole.memory.formula import memory_table
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.table import MemoryTable
from memconsole.memory.tracers.question import traced_plan
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
    # Where a micro-batch begins, weights outside the blocks are there twice: as they were received, too.
    begun = share + width * (2 * block + 2 * outside)
    for phase in ("forward", "evaluation"):
        assert component(split, "weights", phase) == begun, phase
    assert component(split, "weights", "loss") == share + width * outside
    if precision == "fp32":
        assert component(split, "weights", "backward") == share + width * (2 * block + outside)
        return
    # The embedding's gradient, which is added up in fp32 and then cast, is the last before those outside the blocks are
    # exchanged.
    assert component(split, "weights", "backward") == share + width * outside
    gradients = component(split, "gradients", "backward")
    own = -(-4 * block * model.layers // 8)
    assert own + width * outside / 2 < gradients < own + (width + 4) * outside
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


def test_an_update_works_on_the_rows_that_a_device_holds() -> None:
    """Temporaries and visiting state have the size of a share, whatever the optimizer does with it."""
    split = {"optimize.sharding": "fsdp", "optimize.precision": "bf16"}
    for changes, name in (
        ({"optimize.optimizer": "lion"}, "workspace"),
        ({"optimize.optimizer_offload": "pinned"}, "optimizer state"),
    ):
        two, eight = (table(split | changes | {"device.count": n}) for n in (2, 8))
        most, least = (component(t, name, "optimizer step") for t in (two, eight))
        assert 0 < least <= -(-most // 4) + 1, name


def test_copies_that_accumulate_hold_gradients_beside_the_buffers_that_they_exchange() -> None:
    changes = {"device.count": 2, "optimize.sharding": "ddp", "optimize.accumulation_steps": 2}
    summed, once = table(changes), table(changes | {"optimize.accumulation_steps": 1})
    for phase in ("forward", "loss", "optimizer step"):
        assert component(summed, "gradients", phase) == 2 * component(once, "gradients", phase)
    assert component(summed, "gradients", "evaluation") == component(
        once, "gradients", "evaluation"
    )


def test_weights_that_are_shared_are_gathered_to_be_saved_whatever_the_model() -> None:
    changes = {"model.name": "lqr", "data.source": "lqr", "data.sequence_length": 64}
    split = {"device.count": 2, "optimize.sharding": "fsdp", "device.name": "cpu"}
    alone, shared = (
        memory_table(plan, catalog.model(plan), msgspec.structs.replace(CARD, kind="cpu"))
        for plan in (replace(Plan(), changes), replace(Plan(), changes | split))
    )
    whole = component(alone, "weights", "checkpoint") + component(
        alone, "optimizer state", "checkpoint"
    )
    assert component(shared, "workspace", "checkpoint") == pytest.approx(whole, abs=16)


def test_a_jax_process_on_a_cpu_holds_the_tensors_of_all_its_devices() -> None:
    cpu = msgspec.structs.replace(CARD, kind="cpu")
    changes = {"backend": "jax", "device.name": "cpu", "optimize.sharding": "fsdp"}
    plan = replace(Plan(), changes | {"device.count": 4})
    together = memory_table(plan, catalog.model(plan), cpu)
    apart = replace(plan, {"launch.devices_per_node": 2})
    of_node = memory_table(apart, catalog.model(apart), cpu)
    assert together.peak_bytes == of_node.peak_bytes
    assert together.host_bytes - of_node.host_bytes == 2 * together.peak_bytes


@pytest.mark.parametrize(
    "changes", [{"device.count": 8}, {"optimize.sharding": "ddp"}, {"launch.devices_per_node": 2}]
)
def test_exact_numbers_are_kept_apart_by_devices_sharding_and_nodes(
    changes: dict[str, Any],
) -> None:
    plan = replace(
        Plan(), LARGE | {"backend": "jax", "device.count": 4, "optimize.sharding": "fsdp"}
    )
    assert traced_plan(plan, CARD).key != traced_plan(replace(plan, changes), CARD).key


@pytest.mark.parametrize(("kind", "freed"), [("cpu", True), ("tpu", True), ("gpu", False)])
def test_a_separate_head_is_free_when_its_gradient_is_made_except_on_a_gpu(
    kind: str, freed: bool
) -> None:
    settings = {"backend": "jax", "device.count": 4, "optimize.sharding": "fsdp"}
    plan = replace(Plan(), settings | {"model.name": "llama-3.1-8b"})
    step = step_of(plan, catalog.model(plan), kind)
    assert step.sizes.head > 0
    found = Gathered.of(step, 4).head
    assert found == (0 if freed else 4 * step.head)
    assert Gathered.of(step, 4, training=False).head == 4 * step.head
