"""What operators return and allocate on other kinds of device than a CPU, for a trace on fake CPU tensors.

Names of sources in comments are files of PyTorch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from memconsole.memory.activations.torch_timeline import EMBEDDING_FEW, EMBEDDING_ROWS
from memconsole_torch.models import capped_attention
from memconsole_torch.techniques.activations import dropout
from memconsole_torch.tracing import trace_experts
from memconsole_torch.tracing.trace_liveness import Override, Workspace

aten = torch.ops.aten
NORM_CHUNK = 65_536
"""Elements that each thread block of `_foreach_norm` reduces (PyTorch, MultiTensorApply.cuh, kChunkSize)."""


def overrides() -> dict[Any, Override]:
    """Replacements for operators that read data, which fake tensors do not have, or only write in place."""
    in_place = (
        "_fused_adamw_.default", "_fused_sgd_.default", "_foreach_mul_.Tensor", "_foreach_lerp_.Scalar",
    )  # fmt: skip
    replaced: dict[Any, Override] = {_operator(name): do_nothing for name in in_place}
    replaced[aten._local_scalar_dense.default] = lambda *_: 1.0
    return replaced


def device_overrides(kind: str) -> dict[Any, Override]:
    """Replacements for operators whose kernels return other tensors on a `kind` of device."""
    if kind not in ("gpu", "rocm"):
        return {}
    return {
        aten._scaled_dot_product_flash_attention.default: _flash,
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        aten._scaled_dot_product_efficient_attention.default: _efficient,
        aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    }


def workspaces(kind: str, rows_bound: bool, few: bool | None = None) -> dict[Any, Workspace]:
    """What kernels of a `kind` of device allocate internally.

    `rows_bound`: the plan's micro-batch has at most as many tokens as the vocabulary has entries. `few`: it has at most
    `EMBEDDING_FEW` tokens; None if the number of traced tokens decides. Both are given because the traced micro-batch may
    have another size.
    """
    everywhere: dict[Any, Workspace] = {
        dropout.OPERATOR: dropout.workspace,
        capped_attention.OPERATOR: capped_attention.forward_workspace,
        capped_attention.BACKWARD_OPERATOR: capped_attention.backward_workspace,
        **trace_experts.workspaces(kind),
    }
    if kind not in ("gpu", "rocm"):
        return everywhere
    return everywhere | {
        aten._scaled_dot_product_flash_attention_backward.default: _flash_workspace,
        aten._scaled_dot_product_efficient_attention_backward.default: _efficient_workspace,
        aten._foreach_norm.Scalar: _norm_workspace,
        aten.embedding_dense_backward.default: partial(_embedding_workspace, rows_bound, few),
    }


def _flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Any, ...]:
    """The output in the layout of the queries, log-sum-exp (B, A, T), and the random state."""
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    state = q.new_empty(2, dtype=torch.int64)
    empty = q.new_empty(0)
    length = q.shape[2]
    return torch.empty_like(q), logsumexp, None, None, length, length, state, empty, empty


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _flash_workspace(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any
) -> list[int]:
    """Contiguous copies of output and gradient, the fp32 sum of the queries' gradient and row sums
    (flash_api.cpp, mha_bwd: dq_accum, softmax_d), and unsummed gradients of shared keys and values."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    padded_head = -(-q.shape[3] // 32) * 32
    sizes = [x.nbytes for x in (gradient, out) if not x.transpose(1, 2).is_contiguous()]
    sizes += [4 * rows * padded_head, 4 * rows]
    if k.shape[1] != q.shape[1]:
        sizes += [q.nbytes, q.nbytes]
    return sizes


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, recorded: bool, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """The output in layout (B, T, A, D), log-sum-exp if gradients are recorded, and the random state."""
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    rows = (batch, heads, length if recorded else 0)
    logsumexp = q.new_empty(rows, dtype=torch.float32)
    return out, logsumexp, q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)


def _efficient_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> tuple[Any, ...]:
    def like(x: Tensor) -> Tensor:
        batch, heads, length, size = x.shape
        return x.new_empty(batch, length, heads, size).transpose(1, 2)

    return like(q), like(k), like(v), None


def _efficient_workspace(gradient: Tensor, q: Tensor, *rest: Any) -> list[int]:
    """The fp32 sum of the queries' gradient (kernel_backward.h, kEnableSplitKeys: GradQTempStorage) and row sums.
    For fp32 inputs the row sums are computed outside the kernel (kKernelComputesDelta)."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    # In fp32 also output times gradient, before it is summed.
    product = [q.nbytes] if q.dtype == torch.float32 else []
    return [*product, 4 * rows, 4 * rows * q.shape[3]]


def _norm_workspace(tensors: list[Tensor], *rest: Any) -> list[int]:
    """Partial norms in fp32: one per chunk, with as many chunks for each tensor as for the largest."""
    chunks = max(-(-t.numel() // NORM_CHUNK) for t in tensors)
    return [4 * len(tensors) * chunks]


def _embedding_workspace(
    rows_bound: bool, few: bool | None, gradient: Tensor, tokens: Tensor, rows: int, *rest: Any
) -> list[int]:
    """Sorted tokens with their positions, and fp32 partial sums: at most one row per ten tokens and one per distinct
    token (EmbeddingBackwardKernel.cu, grad_weight_per_segment). Few tokens are neither sorted nor summed in parts."""
    if few or (few is None and tokens.numel() <= EMBEDDING_FEW):
        return []
    tokens_bytes = 8 * tokens.numel()
    row_bytes = 4 * -(-gradient.shape[-1] // 32) * 32
    distinct = tokens.numel() if rows_bound else rows
    return [
        tokens_bytes,
        tokens_bytes,
        # The kernel makes one allocation of these two. They are apart because only the first always depends on the tokens.
        tokens.numel() * (row_bytes // EMBEDDING_ROWS),
        distinct * row_bytes,
    ]


def _operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def do_nothing(*arguments: Any, **options: Any) -> None:
    """An operator that writes in place and allocates nothing."""
