"""Gradient checkpointing (JAX: remat; Chen et al. 2016): which values of a block survive the forward pass.

Each wrapper goes around one block inside the scan over layers. `prevent_cse` is off because forward
and backward are separate loops, where XLA cannot undo the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from memconsole.plan.plan import Checkpointing

Function = Callable[..., Any]
_policies = jax.checkpoint_policies


def full(block: Function) -> Function:
    """Keep the block's input only, (B, T, C) per layer; run the block again in the backward pass."""
    return jax.checkpoint(block, prevent_cse=False, policy=_policies.nothing_saveable)


def selective(block: Function) -> Function:
    """Keep the outputs of matmuls and of attention; recompute norms, activations and rotations."""
    policy = _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable,
        _policies.save_only_these_names("attention"),
    )
    return jax.checkpoint(block, prevent_cse=False, policy=policy)


def none(block: Function) -> Function:
    """Keep everything the backward pass reads (the decoder itself recomputes elementwise pieces)."""
    return block


def around(mode: Checkpointing) -> Callable[[Function], Function]:
    """The wrapper that `optimize.gradient_checkpointing` names."""
    return {"none": none, "selective": selective, "full": full}[mode]
