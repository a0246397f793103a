"""Toggles: what a key press changes, and what may be priced but not launched."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memconsole.plan.optimizations import BY_KEY, OPTIMIZATIONS, check_trainable
from memconsole.plan.plan import Plan, PlanError, replace


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_default_plan_can_be_trained_by_both_backends(backend: str) -> None:
    check_trainable(replace(Plan(), {"backend": backend}))


def test_a_third_backend_trains_plain_plans_of_any_size() -> None:
    third = msgspec.structs.replace(
        replace(Plan(), {"train.batch_size": 3, "data.sequence_length": 77}), backend="other"
    )
    check_trainable(third)
    with pytest.raises(PlanError, match=r"optimize\.fused_loss"):
        check_trainable(replace(third, {"optimize.fused_loss": True}))


@pytest.mark.parametrize(
    "settings",
    [
        {"optimize.compile": True, "backend": "jax"},
        {"device.count": 2},
    ],
)
def test_what_no_engine_implements_is_refused_before_launch(settings: dict[str, Any]) -> None:
    key = next(iter(settings))
    with pytest.raises(PlanError) as error:
        check_trainable(replace(Plan(), settings))
    assert error.value.key == key
    assert str(error.value).startswith(f"{key} = ")
    assert "\n" not in str(error.value)


def test_accumulation_keeps_the_effective_batch() -> None:
    row = BY_KEY["optimize.accumulation_steps"]
    plan = replace(Plan(), {"train.batch_size": 12, "optimize.accumulation_steps": 2})
    for steps in row.values(plan):
        changed = row.apply(plan, steps)
        assert changed.effective_batch == 24
        assert changed.optimize.accumulation_steps == steps


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


def test_every_row_is_described_and_offers_its_present_value() -> None:
    for row in OPTIMIZATIONS:
        assert row.help, row.key
        assert row.costs, row.key
        assert row.value(Plan()) in row.values(Plan())
