"""What the estimator offers or calls fitting is what the trainer takes: experts, pairs, nodes, windows, host memory."""

from __future__ import annotations

import time
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest

from memconsole import announcing
from memconsole.announcing import host_words
from memconsole.devices.budget import PROCESS, budget
from memconsole.devices.planned import catalog_budgets
from memconsole.devices.reading import DeviceReading, Devices, Missing
from memconsole.memory.answers.advice import largest_sequence_length
from memconsole.memory.answers.pace import slowdown
from memconsole.memory.answers.places import places
from memconsole.memory.answers.receipts import Machine, Measured
from memconsole.memory.answers.solve import fit
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.exact.affine import structure_key
from memconsole.memory.state.data import dataset_tokens
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_trainer.host import memory_limit
from tests.unit.memory.cards import card

GIB = 1 << 30
HERE = Machine("this processor", {"torch": "2.13.0"})


def on_card(**changes: object) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(Plan(), {"device.name": "h100-80gb", **settings})


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_fit_of_experts_is_trained(backend: str) -> None:
    plan = on_card(model__name="granite-3.1-1b-a400m", backend=backend, train__max_steps=100_000)
    fitted = fit(plan, catalog_budgets(plan)["h100-80gb"])
    assert fitted.fits
    check(fitted.plan)
    check_trainable(fitted.plan, "gpu")


@pytest.mark.parametrize("rows", [2, 6, 8])
@pytest.mark.parametrize("steps", [1, 3])
def test_devices_share_whole_pairs(rows: int, steps: int) -> None:
    plan = on_card(
        train__objective="dpo", train__batch_size=rows, optimize__accumulation_steps=steps
    )
    for other in places(plan, frozenset(), 8):
        assert other.train.batch_size % 2 == 0
        assert other.effective_batch == plan.effective_batch


def test_devices_fill_their_nodes() -> None:
    plan = on_card(train__batch_size=48, launch__on="slurm", launch__devices_per_node=6)
    assert {other.device.count for other in places(plan, frozenset(), 12)} == {1, 2, 4, 12}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_offloaded_activations_are_host_memory(backend: str) -> None:
    plan = on_card(
        backend=backend, model__name="llama-3.2-3b", data__sequence_length=65_536,
        train__batch_size=1, optimize__precision="bf16", optimize__fused_loss=True,
        optimize__gradient_checkpointing="full",
    )  # fmt: skip
    moved = replace(plan, {"optimize.activation_offload": True})
    here, there = (table_of(p, card(80 * GIB)) for p in (plan, moved))
    model = catalog.model(plan)
    inputs = model.layers * 65_536 * model.hidden_size * 4  # fp32 between blocks
    assert there.host_bytes - here.host_bytes == pytest.approx(inputs, rel=0.1)
    assert there.device_bytes < here.device_bytes


def test_devices_of_a_cpu_share_its_memory() -> None:
    unknown = Missing("not asked")
    host = DeviceReading(
        id="cpu", name="a processor", kind="cpu", memory_label="host RAM", total_bytes=32 * GIB,
        used_bytes=unknown, free_bytes=20 * GIB, utilization_percent=unknown,
        temperature_celsius=unknown, power_watts=unknown,
    )  # fmt: skip
    devices = Devices(devices=(host,))
    plan = replace(Plan(), {"device.name": "cpu"})
    alone = budget(plan, devices).usable_bytes
    taken = PROCESS["torch"][1]
    assert alone == 20 * GIB - taken
    four = replace(plan, {"device.count": 4, "optimize.sharding": "ddp"})
    shared = budget(four, devices)
    assert shared.usable_bytes == (20 * GIB - 4 * taken) // 4
    assert "in each of 4 processes, shared by 4" in shared.why
    in_jax = budget(replace(four, {"backend": "jax"}), devices)
    assert in_jax.usable_bytes == (20 * GIB - PROCESS["jax"][1]) // 4


def test_runs_with_another_number_of_threads_do_not_tell_the_speed() -> None:
    plan = replace(Plan(), {"device.name": "cpu"})
    slow = Measured(
        plan=replace(plan, {"device.threads": 1}), device_name=HERE.device_name,
        device_total_bytes=None, driver=None, versions=HERE.versions, peak_bytes=1,
        step_seconds=8.0,
    )  # fmt: skip
    assert slowdown(plan, HERE, [slow], lambda p: 1.0, lambda p: 1) is None
    same = replace(plan, {"device.threads": 1})
    found = slowdown(same, HERE, [slow], lambda p: 1.0, lambda p: 1)
    assert found is not None
    assert found.factor == 8.0


def test_a_trace_is_not_reused_where_an_evaluation_has_more_chunks() -> None:
    plan = on_card(
        model__name="gpt2", train__batch_size=16, train__evaluation_batch_size=1,
        data__sequence_length=256,
    )  # fmt: skip
    longer = replace(plan, {"data.sequence_length": 1024})
    one, other = (structure_key(p, model_of(p), "gpu") for p in (plan, longer))
    assert one != other


def test_data_that_grow_are_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = tmp_path / "text.txt"
    file.write_text("a word " * 10_000)
    plan = replace(Plan(), {"data.source": str(file)})
    before = dataset_tokens(plan)
    assert before
    file.write_text("a word " * 100_000)
    now += 1.0
    after = dataset_tokens(plan)
    assert after
    assert after > 5 * before


def test_rows_are_no_longer_than_windows(tmp_path: Path) -> None:
    file = tmp_path / "windows.h5"
    with h5py.File(file, "w") as made:
        made["input_sequences"] = np.zeros((64, 32, 19), np.float32)
        made["controls"] = np.zeros((64, 6), np.float32)
        made["control_masks"] = np.ones((64, 6), np.float32)
    plan = replace(
        Plan(),
        {
            "model.name": "lqr",
            "data.source": str(file),
            "data.sequence_length": 32,
            "device.name": "cpu",
        },
    )
    check(plan)
    found = largest_sequence_length(plan, card(64 * GIB, "cpu"))
    assert found is not None
    assert found.size == 32
    with pytest.raises(PlanError, match="hold 32 steps"):
        check(replace(plan, {"data.sequence_length": 40}))


def test_several_devices_are_of_a_kind_of_which_there_can_be_several() -> None:
    one = on_card(model__name="gpt2")
    several = replace(one, {"device.count": 8, "optimize.sharding": "fsdp"})
    kinds = {budget.kind for budget in catalog_budgets(several).values()}
    assert "apple" in {budget.kind for budget in catalog_budgets(one).values()}
    assert "apple" not in kinds
    assert "gpu" in kinds


def test_host_memory_that_a_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = on_card(model__name="gpt2")
    local = msgspec.structs.replace(card(80 * GIB), local=True)
    table = table_of(plan, local)
    monkeypatch.setattr(announcing, "fillable_bytes", lambda: table.host_bytes)
    assert host_words(plan, table) == ""
    two = replace(plan, {"device.count": 2, "optimize.sharding": "ddp"})
    assert "in 2 processes, this machine has" in host_words(two, table_of(two, local))
    assert host_words(replace(two, {"launch.on": "slurm"}), table) == ""
    elsewhere = table_of(two, card(80 * GIB))
    assert host_words(two, elsewhere) == ""


def test_processes_of_a_cpu_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit.available_memory, "fillable_bytes", lambda: 12 * GIB)
    plan = replace(Plan(), {"device.name": "cpu", "device.count": 4, "optimize.sharding": "ddp"})
    assert memory_limit._left(plan) == 3 * GIB
    assert memory_limit._left(replace(plan, {"backend": "jax"})) == 12 * GIB
