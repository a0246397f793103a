"""Gradient checkpointing, applied around the blocks of a plain decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memconsole.plan.plan import Checkpointing
from memconsole_torch.decoder import Decoder

_KEPT_NAMES = (
    "mm",
    "addmm",
    "linear",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math_for_mps",
)
KEPT = frozenset(
    getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)
)
"""Operations whose outputs selective checkpointing keeps: linear layers, and attention where a kernel does it: where it is
composed, as on MPS, its batched products are as large as the scores."""


def apply(decoder: Decoder, mode: Checkpointing) -> None:
    """Recompute in the backward pass: nothing, whole blocks (`full`), or all but `KEPT` (`selective`).

    Blocks are the boundary: a `full` block keeps its input alone. No layer draws random numbers, so
    none are saved.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in decoder.layers:
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, **options)

    return run


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
