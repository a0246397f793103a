"""What XLA plans for the JAX engine's own training step, in bytes, without running or allocating anything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan
from memconsole_jax.optimizers import transformation
from memconsole_jax.stacking import stacks
from memconsole_jax.step import Trained, evaluation_step, train_step


def planned(plan: Plan, architecture: Architecture) -> dict[str, int]:
    """Argument, output, alias and temporary bytes of one training step on the default device."""
    compiled = lower(plan, architecture).compile()
    m: Any = compiled.memory_analysis()
    return {
        "argument": m.argument_size_in_bytes,
        "output": m.output_size_in_bytes,
        "alias": m.alias_size_in_bytes,
        "temporary": m.temp_size_in_bytes,
    }


def planned_bytes(plan: Plan, architecture: Architecture) -> int:
    """Live bytes at the step's peak: what goes in and out, counted once where reused, and temporaries."""
    p = planned(plan, architecture)
    return p["argument"] + p["output"] - p["alias"] + p["temporary"]


def planned_evaluation(plan: Plan, architecture: Architecture) -> int:
    """Temporary bytes of one evaluation batch."""
    trained, kept = _weights(architecture)
    rows = jax.ShapeDtypeStruct((plan.train.batch_size, plan.data.sequence_length), jnp.int32)
    sums = jax.ShapeDtypeStruct((2,), jnp.float32)
    step: Any = evaluation_step(plan, architecture)
    compiled = step.lower(sums, trained, kept, rows, rows).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def lower(plan: Plan, architecture: Architecture) -> Any:
    """The engine's step over shapes alone."""
    trained, kept = _weights(architecture)
    rule = transformation(plan, architecture)
    state = jax.eval_shape(rule.init, trained)
    shape = (plan.optimize.accumulation_steps, plan.train.batch_size, plan.data.sequence_length)
    rows = jax.ShapeDtypeStruct(shape, jnp.int32)
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    return train_step(plan, architecture, rule).lower(
        Trained(trained, state), kept, rows, rows, rate
    )


def _weights(architecture: Architecture) -> tuple[dict[str, Any], dict[str, Any]]:
    trained: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name, stack in stacks(architecture).items():
        target = trained if stack.used else kept
        target[name] = jax.ShapeDtypeStruct(stack.shape, jnp.float32)
    return trained, kept
