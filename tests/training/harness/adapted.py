"""Small models with LoRA adapters on a frozen base: plans, engines, batches and their state."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import check_trainable
from memconsole_jax import engine as jax_engine
from memconsole_torch import engine as torch_engine
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch
from memconsole_trainer.randomness import generator
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

MODELS = {
    "llama": msgspec.structs.replace(tiny_models.ARCHITECTURES["qwen3"], layers=2),
    "gpt2": msgspec.structs.replace(tiny_models.ARCHITECTURES["gpt2"], layers=2),
    "gpt_neox": msgspec.structs.replace(tiny_models.ARCHITECTURES["gpt_neox"], layers=2),
    "experts": msgspec.structs.replace(tiny_models.ARCHITECTURES["qwen3_moe"], layers=2),
}


RANK, LENGTH, STEPS = 4, 16, 20


COMPOSED = {
    "optimize.precision": "bf16",
    "optimize.gradient_checkpointing": "full",
    "optimize.fused_loss": True,
    "optimize.accumulation_steps": 2,
    "optimize.optimizer": "adamw-8bit",
    "train.batch_size": 2,
}


BASE = {
    "device.name": "cpu",
    "data.sequence_length": LENGTH,
    "train.batch_size": 4,
    "train.learning_rate": 1e-2,
    "train.warmup_steps": 2,
    "train.sample_tokens": 0,
}
"""Settings of a plan for one of `MODELS` on `batch`."""


class Base:
    """A model whose every tensor is far from zero."""

    def __init__(self, kind: str, noise: float = 0.1) -> None:
        self._start, self._noise = InitialWeights(MODELS[kind], 3), noise

    def tensor(self, name: str) -> np.ndarray:
        array = self._start.tensor(name)
        noise = generator(9, name).standard_normal(array.shape, dtype=np.float32)
        return array + np.float32(self._noise) * noise


def plan_with(backend: str, changes: dict[str, Any] | None = None) -> Plan:
    base = BASE | {
        "backend": backend,
        "train.weight_decay": 0.1,
        "optimize.fused_loss": False,
        "optimize.lora_rank": RANK,
        "optimize.freeze_base": True,
    }
    plan = plans.replace(Plan(), base | (changes or {}))
    check_trainable(plan)
    return plan


def built(plan: Plan, kind: str = "llama", weights: Any = None) -> Any:
    module: Any = torch_engine if plan.backend == "torch" else jax_engine
    engine = module.create(plan, None)
    engine.build(plan, MODELS[kind], STEPS, weights or Base(kind))
    return engine


def batch(plan: Plan, step: int) -> Batch:
    found = tiny_models.batch(1, 4, LENGTH, seed=step % 4, masked=0.1)
    shape = plan.optimize.accumulation_steps, plan.train.batch_size, LENGTH
    return language_batch(found["inputs"].reshape(shape), found["targets"].reshape(shape))


@cache
def trained(backend: str, kind: str = "llama", composed: bool = False) -> tuple[Any, list[float]]:
    """An engine after 20 steps, and their losses."""
    plan = plan_with(backend, COMPOSED if composed else None)
    engine = built(plan, kind)
    for step in range(STEPS):
        engine.train_step(batch(plan, step))
    return engine, [m.loss for m in engine.take_metrics()]


class State:
    """A checkpoint's tensors, copied."""

    def __init__(self, engine: Any) -> None:
        self.tensors = {name: np.array(array) for name, array in engine.state()}

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]
