"""Gradient checkpointing, applied around the blocks of a plain module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Checkpointing
from memconsole_torch.models import capped_attention, expert_products
from memconsole_torch.models.linear import Linear

_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::linear": 1, "mkldnn::_linear_pointwise": 1}
"""Operations of linear layers, and the index of the weight among their arguments."""
_TRANSPOSED = frozenset({"aten::linear", "mkldnn::_linear_pointwise"})
"""Those whose weight is (out, in)."""
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
_KEPT_PACKETS = [getattr(torch.ops.aten, name, None) for name in _KEPT_NAMES]
_KEPT_PACKETS += [getattr(torch.ops.mkldnn, "_linear_pointwise", None)]
_EXPERTS = expert_products.INNER_OPERATOR
KEPT = frozenset(packet.default for packet in _KEPT_PACKETS if packet) | {
    capped_attention.OPERATOR,
    _EXPERTS,
}
"""Operations whose outputs checkpointing can keep: linear layers, the inner products of experts, and attention if it is one
kernel. Where attention is composed of several operations, as on MPS, its batched products are as
large as the scores."""


WHOLE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""Options of a checkpoint that keeps only the inputs."""


def apply(module: nn.Module, mode: Checkpointing, rank: int = 0, *, compiled: bool = False) -> None:
    """Recompute in the backward pass: nothing, whole blocks (`full`), all but attention
    (`attention`), or all but `KEPT` (`selective`).

    Each block is checkpointed separately; with `full` it keeps only its input. Otherwise three parts of a parallel block
    are: its MLP, attention's heads, and their projection, whose input is kept already and whose output the backward pass
    does not read, so that it is neither kept nor computed again. The compiler drops it from a whole block itself. Masks of
    dropout are drawn by key, so no random state is saved. `rank` is that of the adapters, 0 without adapters. `compiled`:
    the blocks will be compiled.
    """
    if mode == "none":
        return
    options = dict(WHOLE)
    shape = getattr(module.model, "decoder", module.model)
    if mode != "full":
        policy = partial(_policy, shape, rank, mode == "selective")
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    parallel = isinstance(shape, Architecture) and shape.parallel_residual
    for block in module.layers:
        if isinstance(block.mlp.down, Linear):
            block.mlp.down.ends_checkpoint = _ends_with_product(shape)
        if not parallel or mode == "full" or compiled:
            block.forward = _checkpointed(block.forward, options)
            continue
        block.attention_heads = _checkpointed(block.attention_heads, options)
        block.mlp_output = _checkpointed(block.mlp_output, options)
        attention = block.attention
        if isinstance(attention.output, Linear):  # a frozen matrix has no copy in 16 bits
            attention.output.ends_checkpoint = True
            attention.project_output = _checkpointed(attention.project_output, WHOLE)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, **options)

    return run


def _policy(
    a: Any,
    rank: int,
    products: bool,
    context: Any,
    operation: Any,
    *arguments: Any,
    **options: Any,
) -> CheckpointPolicy:
    if operation not in KEPT or _is_made_again(a, rank, products, operation, arguments):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _is_made_again(
    a: Any, rank: int, products: bool, operation: Any, arguments: tuple[Any, ...]
) -> bool:
    """Whether the result of `operation` is a matrix product that is recomputed. Unless `products` are kept,
    all of them are. Otherwise only two are: the block's last product, which its backward pass does not
    read, and an adapter's second product, which is cheap to compute."""
    name = operation.name()
    if operation is _EXPERTS:
        return not products
    if name not in _PRODUCTS:
        return False
    if not products:
        return True
    shape = tuple(arguments[_PRODUCTS[name]].shape)
    inner, outer = reversed(shape) if name in _TRANSPOSED else shape
    if rank and inner == rank:
        return True
    return _ends_with_product(a) and (inner, outer) == (a.intermediate_size, a.hidden_size)


def _ends_with_product(a: Any) -> bool:
    """Whether a block's last operation but an addition is a product. A norm may read that of the MLP; the regression
    transformer has such a norm in every block. That of experts is part of an operator."""
    return isinstance(a, Architecture) and not (a.post_norms or a.experts)
