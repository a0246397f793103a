"""JAX engines on several host devices train as one device does with the same rows in each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.plan.plan import PlanError, replace
from memconsole.runs.act.environment import trainer_environment
from memconsole_trainer.weights.config_json import config
from tests.training.harness import tiny_models
from tests.training.harness.meshes import differences
from tests.training.harness.pairs import ADAPTERS
from tests.training.harness.torch_processes import plan_of, preferring

jax = pytest.importorskip("jax")
PAIRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, average": {"optimize.accumulation_steps": 2, "train.ema_decay": 0.9},
    "bf16": {"optimize.precision": "bf16"},
    "fp16": {"optimize.precision": "fp16"},
    "16-bit weights": {"optimize.precision": "bf16-sr"},
    "adapters": ADAPTERS,
    "full, chunked loss": {"optimize.gradient_checkpointing": "full", "optimize.fused_loss": True},
    "selective": {"optimize.gradient_checkpointing": "selective"},
    "attention": {"optimize.gradient_checkpointing": "attention"},
    "muon": {"optimize.optimizer": "muon"},
    "apollo-mini": {"optimize.optimizer": "apollo-mini"},
    "adafactor": {"optimize.optimizer": "adafactor"},
    "lion": {"optimize.optimizer": "lion"},
    "sgd": {"optimize.optimizer": "sgd"},
    "documents": {"data.isolate_documents": True},
}
COPIED: dict[str, dict[str, Any]] = {
    "8 bits": {"optimize.optimizer": "adamw-8bit"},
    "codes": ADAPTERS | {"optimize.base_storage": "nf4"},
    "compiled": {"optimize.compile": True, "optimize.accumulation_steps": 2},
}
"""Refused with fsdp."""
NEVER: dict[str, dict[str, Any]] = {
    "offload": {"optimize.optimizer_offload": "pinned"},
    "activations": {
        "optimize.activation_offload": True,
        "optimize.gradient_checkpointing": "full",
    },
    "jumps": {"hybrid.mode": "balanced"},
}
"""Refused on several devices."""


def assert_as_one(found: dict[str, Any], changes: dict[str, Any]) -> None:
    near = 2e-3 if changes.get("optimize.precision") else 2e-6
    assert found["losses"] < near, found
    assert found["norms"] < 10 * near, found
    assert found["evaluated"] < near, found
    assert found["sampled"], found
    assert found["shapes"], found


def cases(changes: dict[str, Any], *shardings: str, count: int = 2, **more: Any) -> list[Any]:
    return [{"changes": changes, "sharding": s, "count": count, **more} for s in shardings]


@pytest.mark.slow
@pytest.mark.parametrize("changes", PAIRS.values(), ids=PAIRS)
def test_each_optimization_trains_on_two_devices_as_on_one(changes: dict[str, Any]) -> None:
    for found in differences(cases(changes, "fsdp", "ddp")):
        assert_as_one(found, changes)


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
def test_two_devices_learn_preferences_as_one(chunked: bool, tmp_path: Path) -> None:
    changes = {**preferring(tmp_path), "optimize.fused_loss": chunked}
    for found in differences(cases(changes, "fsdp", "ddp")):
        assert_as_one(found, changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", COPIED.values(), ids=COPIED)
def test_copies_of_a_model_train_with_what_is_not_split(changes: dict[str, Any]) -> None:
    (found,) = differences(cases(changes, "ddp"))
    assert_as_one(found, changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", "accumulation, average", "bf16", "adapters", "selective"]
)
def test_two_devices_train_a_mixture_of_experts_as_one(name: str, tmp_path: Path) -> None:
    """Each device sorts the tokens of its own rows by expert."""
    a = msgspec.structs.replace(tiny_models.ARCHITECTURES["qwen3_moe"], vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(config(a)))
    changes = PAIRS[name]
    model = {"model.name": str(tmp_path), "model.target_params": None}
    for found in differences(cases(model | changes, "fsdp", "ddp")):
        assert_as_one(found, changes)


@pytest.mark.slow
def test_eight_devices_hold_an_eighth_each() -> None:
    split, copied = differences(cases({}, "fsdp", "ddp", count=8))
    assert_as_one(split, {})
    assert_as_one(copied, {})
    assert split["held"] < split["held_alone"] / 7
    assert copied["held"] == pytest.approx(copied["held_alone"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lqr", "efficientids"])
def test_every_task_trains_on_two_devices_as_on_one(task: str) -> None:
    for found in differences(cases({}, "fsdp", "ddp", task=task)):
        assert_as_one(found, {})


@pytest.mark.parametrize("changes", [*COPIED.values(), *NEVER.values()], ids=[*COPIED, *NEVER])
def test_what_is_not_split_is_refused_with_a_reason(changes: dict[str, Any]) -> None:
    for sharding in ("fsdp", "ddp") if changes in NEVER.values() else ("fsdp",):
        with pytest.raises(PlanError) as error:
            plan_of(2, changes | {"optimize.sharding": sharding, "backend": "jax"})
        assert error.value.key == "optimize.sharding"
        assert "; set " in str(error.value)


def test_a_run_on_a_cpu_gets_as_many_host_devices_as_it_trains_on() -> None:
    plan = plan_of(4, {"backend": "jax", "optimize.sharding": "fsdp"})
    flag = "--xla_force_host_platform_device_count"
    assert trainer_environment(plan, {}, kind="cpu")["XLA_FLAGS"] == f"{flag}=4"
    assert "XLA_FLAGS" not in trainer_environment(plan, {}, kind="cuda")
    nodes = replace(plan, {"launch.devices_per_node": 2})
    assert trainer_environment(nodes, {}, kind="cpu")["XLA_FLAGS"] == f"{flag}=2"
    own = {"XLA_FLAGS": f"{flag}=9"}
    assert trainer_environment(plan, own, kind="cpu")["XLA_FLAGS"] == f"{flag}=9"
    more = trainer_environment(plan, {"XLA_FLAGS": "--xla_dump_to=x"}, kind="cpu")["XLA_FLAGS"]
    assert more == f"--xla_dump_to=x {flag}=4"
