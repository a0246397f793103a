"""The generated part of a step's cache keys: what of a plan changes a step, and that nothing is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from memconsole.memory.activations import torch_step
from memconsole.memory.estimate import model_of
from memconsole.memory.exact import affine
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.step_key import NAMED_OTHERWISE, OUTSIDE_THE_STEP, SWITCHES, step_settings
from memconsole.plan.plan import SETTINGS, Plan, get, replace
from memconsole.plan.toggles.optimization import Reach
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS

OWNERS = {setting: row for row in OPTIMIZATIONS for setting in row.settings}


def another(key: str) -> Any:
    """A value of a setting that is not the default one, and on the other side of zero where it is a number."""
    setting, present = SETTINGS[key], get(Plan(), key)
    if setting.choices:
        return next(choice for choice in setting.choices if choice != present)
    if setting.holds is bool:
        return not present
    if setting.holds is str:
        return "another"
    if key in SWITCHES:
        return 0.0 if present or present is None else 0.5
    if setting.holds is int:
        return 96
    return present / 2 if present else 0.5


def structure(plan: Plan) -> str:
    return affine.structure_key(plan, model_of(plan), "gpu")


def blocks(plan: Plan) -> tuple[object, ...]:
    return torch_step.structure(step_of(plan, model_of(plan), "gpu"))


@pytest.mark.parametrize("key", [key for key in SETTINGS if key not in NAMED_OTHERWISE])
def test_a_setting_is_part_of_the_key_unless_it_is_said_to_change_no_step(key: str) -> None:
    row = OWNERS.get(key)
    plan = replace(Plan(), {key: another(key)})
    assert plan != Plan()
    reach = row.reach if row else None
    left_out = key in OUTSIDE_THE_STEP or reach in (Reach.HEAP, Reach.SIZES, Reach.NOTHING)
    assert (step_settings(plan, "gpu") == step_settings(Plan(), "gpu")) == left_out
    if not left_out:
        assert structure(plan) != structure(Plan())
        assert (blocks(plan) == blocks(Plan())) == (reach is Reach.UPDATE)


def test_every_exception_is_a_setting_that_no_optimization_owns() -> None:
    named = [*NAMED_OTHERWISE, *OUTSIDE_THE_STEP, *SWITCHES]
    assert len(set(named)) == len(named)
    assert set(named) <= set(SETTINGS) - set(OWNERS)


def test_sizes_are_in_both_keys_by_what_they_change() -> None:
    for changes in ({"train.batch_size": 1}, {"train.evaluation_batch_size": 3}):
        assert structure(replace(Plan(), changes)) != structure(Plan())
        assert blocks(replace(Plan(), changes)) != blocks(Plan())


def test_an_update_inside_the_backward_pass_is_part_of_its_blocks() -> None:
    inside = replace(Plan(), {"optimize.optimizer_in_backward": True, "train.grad_clip": 0.0})
    for key in ("optimize.optimizer", "optimize.optimizer_offload"):
        assert blocks(replace(inside, {key: another(key)})) != blocks(inside)


def test_micro_batches_after_the_first_are_alike_but_on_a_cpu() -> None:
    two, four = (replace(Plan(), {"optimize.accumulation_steps": n}) for n in (2, 4))
    assert step_settings(two, "gpu") == step_settings(four, "gpu") != step_settings(Plan(), "gpu")
    assert step_settings(two, "cpu") != step_settings(four, "cpu")
