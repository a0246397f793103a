"""JAX's formula on a GPU against XLA's own plans."""

from __future__ import annotations

import pytest

from memconsole.memory.activations.jax_step import moments
from memconsole.memory.estimate import model_of
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace

GPT2 = {"model.name": "gpt2", "train.batch_size": 8, "data.sequence_length": 1024}
MEDIUM = {
    "model.name": "gpt2-medium",
    "train.batch_size": 4,
    "data.sequence_length": 512,
    "optimize.optimizer": "adamw-8bit",
    "optimize.gradient_checkpointing": "full",
}


@pytest.mark.parametrize(
    ("settings", "planned_mib"),
    [(GPT2, 8674), ({**GPT2, "optimize.precision": "bf16"}, 5535), (MEDIUM, 4495)],
)
def test_gpt2_is_estimated_within_6_percent_of_what_xla_plans_on_an_h100(
    settings: dict[str, object], planned_mib: int
) -> None:
    """XLA 0.11.2's plans on the card: the rows `JAX =` of tests/accuracy/results/gpu.json."""
    plan = replace(Plan(), {"backend": "jax", "device.name": "h100-80gb", **settings})
    architecture = model_of(plan)
    assert isinstance(architecture, Architecture)
    peak = max(moment.total for moment in moments(step_of(plan, architecture, "gpu")))
    assert peak / 2**20 == pytest.approx(planned_mib, rel=0.06)
