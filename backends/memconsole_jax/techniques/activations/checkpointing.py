"""Gradient checkpointing (JAX: remat; Chen et al. 2016): which values of a block are kept for the
backward pass.

Each wrapper is applied to one block inside the scan over layers. There `prevent_cse` is off, because
forward and backward pass are separate loops, so XLA cannot undo the recomputation. It is on where the
scan is unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from memconsole.plan.plan import Checkpointing, Plan
from memconsole_jax import target
from memconsole_jax.techniques.activations.activation_offload import Disk

Function = Callable[..., Any]
_policies = jax.checkpoint_policies
_INPUT = "block_input"


def full(block: Function, *, prevent_cse: bool = False) -> Function:
    """Keep only the block's input, (B, T, C) per layer, and rerun the block in the backward
    pass."""
    return jax.checkpoint(block, prevent_cse=prevent_cse, policy=_policies.nothing_saveable)


def selective(block: Function, *, prevent_cse: bool = False) -> Function:
    """Keep the outputs of matmuls and attention; recompute norms, activations and rotations."""
    policy = _policies.save_only_these_names("product", "attention")
    return jax.checkpoint(block, prevent_cse=prevent_cse, policy=policy)


def attention(block: Function, *, prevent_cse: bool = False) -> Function:
    """Keep the block's input and attention's output, so that attention is not recomputed for the
    projection after it."""
    policy = _policies.save_only_these_names("attention")
    return jax.checkpoint(block, prevent_cse=prevent_cse, policy=policy)


def none(block: Function, *, prevent_cse: bool = False) -> Function:
    """Keep everything that the backward pass reads, except pieces that the models themselves
    recompute."""
    return block


def offloaded(block: Function) -> Function:
    """Like `full`, but the input is kept in pinned host memory between the passes."""

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
    mode: Checkpointing,
    *,
    unrolled: bool = False,
    offload: bool = False,
    disk: Disk | None = None,
) -> Callable[[Function], Function]:
    """The wrapper that `optimize.gradient_checkpointing` names, for blocks in a scan that may be
    `unrolled`. `offload` keeps inputs in host memory, or on a CPU in `disk`; the plan guarantees
    that the mode is then `full`, in a loop."""
    if offload:
        return (disk or Disk()).offloaded if target.kind() == "cpu" else offloaded
    modes = {"none": none, "selective": selective, "attention": attention, "full": full}
    return partial(modes[mode], prevent_cse=unrolled)


def of_plan(plan: Plan, disk: Disk | None = None) -> Callable[[Function], Function]:
    """The wrapper that `plan` asks for."""
    o = plan.optimize
    return around(
        o.gradient_checkpointing, unrolled=o.compile, offload=o.activation_offload, disk=disk
    )
