"""Blocks compiled each by itself, instead of once in a loop over layers."""

from __future__ import annotations

from memconsole.plan.plan import Plan
from memconsole_jax.models.blocks import BlockRunning
from memconsole_jax.techniques.activations import checkpointing
from memconsole_jax.techniques.activations.activation_offload import Disk


def running(plan: Plan, disk: Disk | None = None) -> BlockRunning:
    """How blocks run as `plan` asks for: with `optimize.compile`, the loop over layers is unrolled."""
    return BlockRunning(checkpointing.of_plan(plan, disk), unrolled=plan.optimize.compile)
