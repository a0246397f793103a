"""Gradient checkpointing (JAX: remat; Chen et al. 2016): which values of a block survive the forward pass.

Each wrapper goes around one block inside the scan over layers. `prevent_cse` is off because forward
and backward are separate loops, where XLA cannot undo the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from memconsole.plan.plan import Checkpointing, Plan
from memconsole_jax import target
from memconsole_jax.techniques.activation_offload import Disk

Function = Callable[..., Any]
_policies = jax.checkpoint_policies
_INPUT = "block_input"


def full(block: Function) -> Function:
    """Keep the block's input only, (B, T, C) per layer; run the block again in the backward pass."""
    return jax.checkpoint(block, prevent_cse=False, policy=_policies.nothing_saveable)


def selective(block: Function) -> Function:
    """Keep the outputs of matmuls and of attention; recompute norms, activations and rotations."""
    policy = _policies.save_only_these_names("product", "attention")
    return jax.checkpoint(block, prevent_cse=False, policy=policy)


def attention(block: Function) -> Function:
    """Keep the block's input and attention's output, which need not be made again for the projection behind it."""
    policy = _policies.save_only_these_names("attention")
    return jax.checkpoint(block, prevent_cse=False, policy=policy)


def none(block: Function) -> Function:
    """Keep everything the backward pass reads (models themselves recompute elementwise pieces)."""
    return block


def offloaded(block: Function) -> Function:
    """`full`, the input waiting in pinned host memory between the passes."""

    def named(x: Any, *rest: Any) -> Any:
        return block(checkpoint_name(x, _INPUT), *rest)

    policy = _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(named, prevent_cse=False, policy=policy)


def around(
    mode: Checkpointing, *, offload: bool = False, disk: Disk | None = None
) -> Callable[[Function], Function]:
    """The wrapper that `optimize.gradient_checkpointing` names. `offload`: to host memory, of a CPU to `disk`, the
    plan being sure that the mode is `full`."""
    if offload:
        return (disk or Disk()).offloaded if target.kind() == "cpu" else offloaded
    return {"none": none, "selective": selective, "attention": attention, "full": full}[mode]


def of_plan(plan: Plan, disk: Disk | None = None) -> Callable[[Function], Function]:
    """The wrapper around each block that `plan` asks for."""
    o = plan.optimize
    return around(o.gradient_checkpointing, offload=o.activation_offload, disk=disk)
