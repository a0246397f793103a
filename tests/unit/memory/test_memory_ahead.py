"""What is made ready for the next key press: all of it, and nothing of it changes a number."""

from __future__ import annotations

import pytest

from memconsole.devices.planned import catalog_budgets
from memconsole.memory.activations import torch_step
from memconsole.memory.estimate import estimate
from memconsole.memory.tracers.ahead import prepared
from memconsole.memory.tracers.question import neighbours
from memconsole.plan.plan import Plan, replace


def planned(**changes: object) -> Plan:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(Plan(), {"model.name": "qwen3-0.6b", "device.name": "rtx-4090", **named})


@pytest.mark.parametrize(
    "plan",
    [
        planned(data__sequence_length=1000),
        planned(optimize__lora_rank=8, optimize__freeze_base=True, model__name="gemma-3-1b"),
        planned(optimize__optimizer_in_backward=True, train__grad_clip=0.0),
        planned(hybrid__mode="balanced"),
    ],
    ids=("plain", "adapters behind a window", "in backward", "hybrid"),
)
def test_the_next_key_press_finds_all_it_needs(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = catalog_budgets(plan)["rtx-4090"]
    after = list(neighbours(plan))
    monkeypatch.setattr(torch_step, "_moments", {})
    plainly = [estimate(changed, budget) for changed in after]
    monkeypatch.setattr(torch_step, "_moments", {})
    for _ in prepared(plan, budget):
        pass
    estimate(plan, budget)
    known = set(torch_step._moments)
    assert [estimate(changed, budget) for changed in after] == plainly
    assert set(torch_step._moments) == known
    assert len(known) > 50


def test_it_stops_between_any_two_plans_and_begins_with_the_selected_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_step, "_moments", {})
    plan = planned(data__sequence_length=1016)
    budget = catalog_budgets(plan)["rtx-4090"]
    work = prepared(plan, budget, "optimize.gradient_checkpointing")
    for _ in range(3):
        next(work)
    work.close()
    assert torch_step._moments
    assert all("selective" in key for key in torch_step._moments)
