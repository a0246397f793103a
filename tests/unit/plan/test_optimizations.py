"""Optimizations: every row is classified, what a key press changes, and what may be priced but not launched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.seconds import step_seconds
from memconsole.memory.table import COMPONENTS
from memconsole.plan import catalog
from memconsole.plan.errors import quote
from memconsole.plan.machine import jemalloc
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import SETTINGS, Plan, PlanError, get, replace
from memconsole.plan.tasks import task_of
from memconsole.plan.toggles.optimization import HOST_MEMORY, Optimization, Reach, Result
from memconsole.plan.toggles.optimizations import (
    BY_KEY,
    OPTIMIZATIONS,
    check_conflicts,
    check_trainable,
    conflict,
    only_evaluating,
)

CLASSIFYING = {
    "key", "keyboard", "label", "short", "help", "costs", "values", "conflicts", "result",
    "reach", "touches", "remedy", "says", "evaluating",
}  # fmt: skip
"""What a row must state: nothing is assumed of an optimization that says nothing."""


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_default_plan_can_be_trained_by_both_backends(backend: str) -> None:
    check_trainable(replace(Plan(), {"backend": backend}))


@pytest.mark.parametrize(
    "settings",
    [
        {"optimize.compile": True, "backend": "jax", "device.name": "cpu"},
        {"device.count": 2},
    ],
)
def test_what_no_engine_implements_is_refused_before_launch(settings: dict[str, Any]) -> None:
    key = next(iter(settings))
    with pytest.raises(PlanError) as error:
        check_trainable(replace(Plan(), settings))
    assert error.value.key == key
    assert str(error.value).startswith(f"{key} = {quote(settings[key])}: ")
    assert "\n" not in str(error.value)


def test_accumulation_keeps_the_effective_batch() -> None:
    row = BY_KEY["optimize.accumulation_steps"]
    plan = replace(Plan(), {"train.batch_size": 12, "optimize.accumulation_steps": 2})
    for steps in row.values(plan):
        changed = row.apply(plan, steps)
        assert changed.effective_batch == 24
        assert changed.optimize.accumulation_steps == steps


def test_a_search_tries_every_divisor_of_few_rows_and_halves_many() -> None:
    row = BY_KEY["optimize.accumulation_steps"]

    def tried(batch: int, steps: int = 1) -> tuple[Any, ...]:
        settings = {"train.batch_size": batch, "optimize.accumulation_steps": steps}
        return row.tried(replace(Plan(), settings))

    assert tried(7) == (1, 7)
    assert tried(9, 2) == (1, 2, 3, 6, 9, 18)
    assert tried(9, 4) == (1, 2, 4, 12, 36)
    assert tried(64) == (1, 2, 4, 8, 16, 32, 64)
    assert tried(1000) == (1, 2, 4, 8, 40, 200, 1000)
    assert tried(720) == (1, 2, 4, 8, 16, 48, 144, 720)
    assert tried(360, 7) == (1, 2, 4, 7, 8, 14, 24, 28, 56, 72, 168, 360, 504, 2520)
    chosen = row.apply(replace(Plan(), {"train.batch_size": 7}), 7)
    assert 7 in row.values(chosen), "the key goes on from what a search chose"


def test_adapters_freeze_the_base_and_thaw_it_again() -> None:
    row = BY_KEY["optimize.lora_rank"]
    on = row.apply(Plan(), 8)
    assert on.optimize.freeze_base
    assert row.apply(on, 0) == Plan()


def test_lengths_offered_stop_at_a_models_learned_positions() -> None:
    row = BY_KEY["data.sequence_length"]
    assert max(row.values(replace(Plan(), {"model.name": "gearhead"}))) == 512
    assert max(row.values(Plan())) == 4096
    assert max(row.values(replace(Plan(), {"model.name": "no such model"}))) == 4096


@pytest.mark.parametrize("row", OPTIMIZATIONS, ids=lambda row: row.key)
def test_every_row_is_described_and_offers_its_present_value(row: Optimization) -> None:
    assert row.help
    assert row.costs
    assert row.value(Plan()) in row.values(Plan())
    assert row.value(Plan()) == row.values(Plan())[0] or row.size
    assert 0 < len(row.short) <= 18
    assert set(row.settings) <= set(SETTINGS)


def test_no_classification_of_a_row_has_a_default() -> None:
    required = {
        field.name
        for field in msgspec.structs.fields(Optimization)
        if field.default is field.default_factory is msgspec.NODEFAULT
    }
    assert required == CLASSIFYING


def test_every_setting_that_optimizes_belongs_to_one_row() -> None:
    owned = [setting for row in OPTIMIZATIONS for setting in row.settings]
    assert len(set(owned)) == len(owned)
    assert {key for key in SETTINGS if key.startswith("optimize.")} <= set(owned)


def test_no_two_rows_share_a_key_or_a_name() -> None:
    for names in (
        [row.keyboard for row in OPTIMIZATIONS],
        [row.label for row in OPTIMIZATIONS],
        [row.short for row in OPTIMIZATIONS],
        [row.remedy.rank for row in OPTIMIZATIONS if row.remedy],
    ):
        assert all(names)
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", OPTIMIZATIONS, ids=lambda row: row.key)
def test_what_a_row_touches_is_a_row_of_the_memory_table_or_host_memory(row: Optimization) -> None:
    assert row.touches == (HOST_MEMORY,) or set(row.touches) <= set(COMPONENTS)
    assert (row.touches == (HOST_MEMORY,)) == (row.reach is Reach.NOTHING)


GPU = Budget(
    name="card", kind="gpu", memory_label="VRAM", total_bytes=1 << 40, usable_bytes=1 << 40, why="test",
    bandwidth_bytes_per_second=1e12, peak_flops={"fp32": 2e13, "bf16": 1e14},
)  # fmt: skip
PRICED: tuple[dict[str, Any], ...] = (
    {},
    {"backend": "jax"},
    {"backend": "jax", "optimize.gradient_checkpointing": "full"},
    {"optimize.lora_rank": 64, "optimize.freeze_base": True},
    {"data.isolate_documents": True},
    {"device.name": "h100-80gb", "device.count": 4},
)


@pytest.mark.parametrize(
    "row",
    [r for r in OPTIMIZATIONS if r.reach not in (Reach.NOTHING, Reach.HEAP)],
    ids=lambda row: row.key,
)
def test_what_a_row_touches_is_what_its_values_make_smaller(row: Optimization) -> None:
    """The component that some value makes smaller by most is the first, and all that are named shrink."""
    saved: Counter[str] = Counter()
    for base in PRICED:
        plan = replace(
            Plan(),
            {
                "model.name": "smollm2-135m",
                "data.sequence_length": 512,
                "train.batch_size": 8,
                "train.evaluation_batch_size": 32,
                "train.grad_clip": 0.0,
                **base,
            },
        )
        before = table_of(plan, GPU)
        for changed in (row.apply(plan, value) for value in row.values(plan)):
            if conflict(changed) is None:
                after = {c.name: c for c in table_of(changed, GPU).components}
                for component in before.components:
                    for phase in before.phases:
                        less = component.at(phase) - after[component.name].at(phase)
                        saved[component.name] = max(saved[component.name], less)
    assert saved.most_common(1)[0][0] == row.touches[0]
    assert all(saved[name] > 2**20 for name in row.touches)


SMALLEST = {
    entry.task: entry.name
    for entry in sorted(catalog.models().values(), key=lambda entry: -(entry.parameters or 0))
    if entry.kind == "fixed"
}
"""The smallest model of each task."""


@pytest.mark.parametrize("model", SMALLEST.values())
def test_a_task_refuses_each_row_that_changes_none_of_its_plans(model: str) -> None:
    """A row that a task says nothing of would be offered where it does nothing. A CPU holds fewer offloaded blocks than
    a GPU, so that offload changes a model of two blocks there."""
    cpu = msgspec.structs.replace(GPU, kind="cpu", name="cpu")
    for row in (r for r in OPTIMIZATIONS if r.reach in (Reach.STEP, Reach.UPDATE)):
        changing = False
        for base in (*PRICED, {"optimize.freeze_base": True}, {"train.batch_size": 64}):
            small = {"model.name": model, "data.sequence_length": 64, "train.grad_clip": 0.0}
            plan = replace(Plan(), {**small, **base})
            others = [row.apply(plan, value) for value in row.values(plan)]
            for device in (GPU, cpu):
                before = table_of(plan, device)
                changing |= any(table_of(p, device) != before for p in others if not conflict(p))
        assert changing or row.key in task_of(plan).not_applicable(plan), row.key


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_heap_costs_memory_or_time_on_a_cpu_and_nothing_elsewhere(backend: str) -> None:
    cpu = msgspec.structs.replace(GPU, kind="cpu", name="cpu")
    fast, tight = (
        replace(Plan(), {"backend": backend, "optimize.heap": heap}) for heap in ("fast", "tight")
    )
    assert table_of(fast, GPU) == table_of(tight, GPU)
    assert table_of(fast, cpu).device_bytes > table_of(tight, cpu).device_bytes
    model = model_of(fast)
    assert step_seconds(fast, model, GPU) == step_seconds(tight, model, GPU)
    assert step_seconds(fast, model, cpu) < step_seconds(tight, model, cpu)


def test_the_heap_of_a_library_is_refused_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(Plan(), {"optimize.heap": "jemalloc"})
    monkeypatch.setattr(jemalloc, "library", lambda: "")
    with pytest.raises(PlanError, match=r"optimize\.heap = \"jemalloc\": no libjemalloc"):
        check_conflicts(plan)
    monkeypatch.setattr(jemalloc, "library", lambda: "/lib/libjemalloc.so.2")
    check_conflicts(plan)


@pytest.mark.parametrize("row", OPTIMIZATIONS, ids=lambda row: row.key)
def test_values_change_the_result_of_training_in_a_known_way(row: Optimization) -> None:
    values = row.values(Plan())
    for before in values:
        for after in values:
            assert isinstance(row.result_of(before, after), Result)
        assert row.result_of(before, before) is Result.SAME


@pytest.mark.parametrize("row", OPTIMIZATIONS, ids=lambda row: row.key)
def test_a_row_refuses_only_its_own_settings(row: Optimization) -> None:
    assert set(row.conflicts) <= set(row.settings)
    assert set(row.changes(Plan(), row.values(Plan())[-1]) if row.changes else ()) <= {
        *row.settings,
        "train.batch_size",
    }


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optimize.precision": "bf16-sr", "optimize.lora_rank": 8, "optimize.freeze_base": True}, "optimize.precision"),
        ({"optimize.freeze_base": True}, "optimize.freeze_base"),
        ({"optimize.base_storage": "nf4"}, "optimize.base_storage"),
        ({"optimize.optimizer": "adafactor", "optimize.optimizer_offload": "compressed"}, "optimize.optimizer_offload"),
        ({"backend": "jax", "optimize.optimizer_offload": "cpu"}, "optimize.optimizer_offload"),
        ({"optimize.activation_offload": True, "optimize.compile": True}, "optimize.activation_offload"),
        ({"backend": "jax", "optimize.activation_offload": True}, "optimize.activation_offload"),
        ({"optimize.optimizer_in_backward": True}, "optimize.optimizer_in_backward"),
    ],
)  # fmt: skip
def test_what_excludes_another_is_refused_by_its_key_and_reason(
    settings: dict[str, Any], key: str
) -> None:
    plan = replace(Plan(), settings)
    found = conflict(plan)
    assert found is not None
    assert found[0] == key
    with pytest.raises(PlanError, match=r"set |only|use ") as error:
        check_conflicts(plan)
    assert error.value.key == key
    assert str(error.value).startswith(f"{key} = ")


@pytest.mark.parametrize(
    ("preset", "settings", "reason"),
    [
        ("lqr", {"optimize.base_storage": "nf4"}, "it has no base to freeze"),
        ("lqr", {"optimize.lora_alpha": 8.0}, "it has no base to freeze"),
        ("efficientids", {"optimize.lora_alpha": 8.0}, "are trained instead of adapters"),
    ],
)
def test_a_refusal_does_not_advise_what_the_task_refuses(
    preset: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason) as error:
        check_conflicts(replace(catalog.preset(preset), settings))
    assert error.value.key in settings
    assert "set optimize" not in str(error.value)


def test_an_evaluation_needs_no_optimization_of_training_and_loses_none_of_its_own() -> None:
    plan = replace(
        Plan(),
        {
            "optimize.precision": "bf16-sr",
            "optimize.optimizer": "adamw-8bit",
            "optimize.optimizer_offload": "pinned",
            "optimize.accumulation_steps": 4,
            "optimize.activation_offload": True,
            "optimize.compile": True,
            "optimize.fused_loss": True,
            "data.isolate_documents": True,
            "train.evaluation_batch_size": 3,
        },
    )
    found = only_evaluating(plan)
    assert conflict(found) is None
    expected = {
        "optimize.precision": "bf16",
        "optimize.optimizer": "sgd",
        "optimize.optimizer_offload": "none",
        "optimize.accumulation_steps": 1,
        "optimize.activation_offload": False,
        "optimize.compile": False,
        "train.beta1": 0.0,
    }
    assert found == replace(plan, expected)
    adapted = replace(
        Plan(),
        {
            "optimize.lora_rank": 8,
            "optimize.freeze_base": True,
            "optimize.base_storage": "nf4",
            "optimize.optimizer_in_backward": True,
        },
    )
    for setting in adapted.optimize.__struct_fields__:
        if setting != "optimizer":
            key = f"optimize.{setting}"
            assert get(only_evaluating(adapted), key) == get(Plan(), key), key


def test_a_trainer_says_which_optimizations_are_on() -> None:
    def said(changes: dict[str, Any], kind: str = "gpu") -> list[str]:
        plan = replace(Plan(), changes)
        return [line for row in OPTIMIZATIONS if row.says and (line := row.says(plan, kind))]

    assert said({}) == ["Optimizer: adamw"]
    for row in OPTIMIZATIONS:
        if row.says is None or row.key in ("optimize.optimizer", "optimize.heap"):
            continue
        for value in row.values(Plan())[1:]:
            lines = said(row.settings_for(Plan(), value))
            assert len(lines) == 2, row.key
    (_, offload, heap) = said({"optimize.optimizer_offload": "compressed"}, "cpu")
    assert (
        offload
        == "Optimizer offload: its state waits in 16 bits in host memory, as everything else"
    )
    assert heap == "Heap: keeps freed memory for the next step"
