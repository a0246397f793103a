"""Emulates other kinds of device for a trace on fake CPU tensors.

Fake CUDA tensors abort a process without CUDA, so every trace runs on fake CPU tensors. `emulated` replaces the functions
of the backend that do something else on the device. Autocast stays that of the CPU: of the operators in a decoder, it
computes the same ones in 16 bits as that of other devices. `trace_operators` has what operators themselves do there.

Names of sources in comments are files of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from memconsole.plan.machine.triton_kinds import TRITON_KINDS
from memconsole_torch import jumps
from memconsole_torch.kernels import launch
from memconsole_torch.models import codes, decoder, linear, norms
from memconsole_torch.techniques.activations import (
    activation_offload,
    fused_loss,
)
from memconsole_torch.techniques.optimizer import (
    blocks,
    compressed,
    offload,
    optimizers,
    quantized_adam,
    stochastic,
)
from memconsole_torch.techniques.weights import average, rounding
from memconsole_torch.tracing.trace_operators import do_nothing
from memconsole_trainer.techniques.base_storage import pairs

aten = torch.ops.aten
FLASH_LARGEST_HEAD = 256
"""PyTorch, sdp_utils.cpp, check_head_dim_size_flash."""
FLASH_ALIGNMENT = 8
"""Elements that head sizes are padded to for the flash kernel (PyTorch, attention.cpp, pad_last_dim)."""
EFFICIENT_ALIGNMENT = 16
"""Bytes that head sizes must be a multiple of for the memory-efficient kernel (sdp_utils.cpp,
minimum_gemm_alignment), and elements that rows of a mask are padded to (attention.cpp, pad_bias)."""


@contextmanager
def emulated(kind: str, *, aligned: bool) -> Iterator[None]:
    """A context in which the engine treats CPU tensors as it would treat tensors on a `kind` of device. Of slices that are
    handled one after another, only the first of each size is traced.

    `aligned`: masks of the plan's sequence length, which may differ from the traced one, need no padding.
    """
    with ExitStack() as stack:
        change = partial(_change, stack)
        change(quantized_adam, "_table", _table)
        change(quantized_adam, "_tables", quantized_adam._tables.__wrapped__)
        change(quantized_adam.Buffers, "update", _first_of_its_size(quantized_adam.Buffers.update))
        change(compressed.Compressed, "_update", _once_a_length(compressed.Compressed._update))
        change(fused_loss, "_passes", partial(_first_pass, kind, fused_loss._passes))
        change(codes, "_pairs", partial(_table, pairs()))
        change(codes, "_slices", _first_slice)
        change(linear, "by_onednn", lambda x, matrix: False)
        change(activation_offload, "store", partial(_NoStore, kind in ("gpu", "rocm")))
        if kind in ("gpu", "rocm"):
            change(offload, "same_memory", lambda device: False)
            change(offload.HostState, "_host_copy", lambda self, tensor: torch.empty_like(tensor))
        if kind != "cpu":
            change(quantized_adam, "CPU_SLICE", quantized_adam.DEVICE_SLICE)
            change(codes, "CPU_SLICE", codes.DEVICE_SLICE)
            change(rounding, "CPU_SLICE", stochastic.DEVICE_SLICE)
            change(compressed, "CPU_SLICE", stochastic.DEVICE_SLICE)
            change(average, "CPU_SLICE", stochastic.DEVICE_SLICE)
            change(blocks, "CPU_SLICE", blocks.DEVICE_SLICE)
            change(jumps, "CPU_SLICE", jumps.DEVICE_SLICE)
            on_cuda = partial(attention_on_cuda, aligned)
            change(decoder, "causal_attention", attention_on_mps if kind == "apple" else on_cuda)
        if kind in ("gpu", "rocm"):
            change(norms, "has_fused_rms_norm", lambda x: True)
            change(norms, "fused_rms_norm", FusedRMSNorm.apply)
        if kind in TRITON_KINDS:
            change(launch, "runs_on", lambda device: True)
            change(launch, "run", do_nothing)
        if kind == "apple":
            change(optimizers, "has_fused", lambda device: False)
        yield


def attention_on_cuda(
    aligned: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """`decoder.causal_attention` with the kernels that CUDA selects: flash for 16 bits without a mask, else memory-efficient."""
    groups, size = q.shape[1] // k.shape[1], q.shape[-1]
    flash = mask is None and q.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and not flash:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if flash and size <= FLASH_LARGEST_HEAD:
        spare = -size % FLASH_ALIGNMENT
        if spare:
            q, k, v = (F.pad(x, (0, spare)) for x in (q, k, v))
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
        return out[..., :size] if spare else out
    if flash or size * q.element_size() % EFFICIENT_ALIGNMENT:
        return _composed(q, k, v, mask, scale)
    if mask is not None:
        mask = _padded(mask, aligned).expand(q.shape[0], q.shape[1], -1, -1)
    recorded = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, recorded, 0.0, mask is None, scale=scale
    )[0]


def attention_on_mps(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`decoder.causal_attention` on MPS, which computes the whole score matrix in one operator and keeps it only if needed."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return _composed(q, k, v, mask, scale)


def _composed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return aten._scaled_dot_product_attention_math(
        q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )[0]


def _padded(mask: Tensor, aligned: bool) -> Tensor:
    length = mask.shape[-1]
    spare = 0 if aligned else -length % EFFICIENT_ALIGNMENT
    return F.pad(mask, (0, spare))[..., :length] if spare else mask


class FusedRMSNorm(torch.autograd.Function):
    """CUDA's fused kernel, which keeps x and 1/rms (..., 1). On CPU tensors torch uses several operators instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1)))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None,
            torch.empty_like(weight) if wanted[1] else None,
            None,
        )


def _table(array: Any, device: torch.device) -> Tensor:
    """Replaces a table of codes by one of its shape and dtype without values."""
    return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)), device=device)


def _first_of_its_size(update: Any) -> Any:
    """Run an 8-bit step's slice update once per size and storage. Other such slices allocate the same bytes, one after
    another."""

    def run(
        self: Any, weight: Tensor, gradient: Tensor, state: Any, start: int, factors: Any
    ) -> None:
        seen = self.__dict__.setdefault("_traced", set())
        size = weight.numel(), "first" in state
        if size not in seen:
            seen.add(size)
            update(self, weight, gradient, state, start, factors)

    return run


def _once_a_length(update: Any) -> Any:
    """Run the slice update of a weight with compressed moments once per slice length."""

    def run(self: Any, p: Tensor, group: Any, start: int, length: int) -> None:
        seen = self.__dict__.setdefault("_traced", set())
        if length not in seen:
            seen.add(length)
            update(self, p, group, start, length)

    return run


class _NoStore:
    """Replaces the stores of `activation_offload`, pinned host memory (`ahead`) or a disk, by one that keeps only shapes."""

    def __init__(self, ahead: bool, device: torch.device, directory: Any) -> None:
        self.ahead = ahead

    def write(self, tensor: Tensor) -> Any:
        return tensor.shape, tensor.dtype

    def read(self, handle: Any) -> Tensor:
        shape, dtype = handle
        return torch.empty(shape, dtype=dtype)

    def wait(self) -> None:
        pass

    def written(self) -> None:
        pass

    def clear(self) -> None:
        pass


def _first_pass(
    kind: str, passes: Any, count: int, vocabulary: int, own: str, cap: float | None
) -> list[slice]:
    """All rows of logits at once, or only the first pass's rows if the logits are capped. The other passes allocate the
    same bytes, one after another."""
    if cap is None:
        return [slice(0, count)]
    all_passes: list[slice] = passes(count, vocabulary, "cpu" if kind == "cpu" else "cuda", cap)
    return all_passes[:1]


def _first_slice(blocks: int, most: int) -> list[slice]:
    """Only the first slice of a matrix's codes. The others allocate the same bytes, one after another."""
    return [slice(0, most)]


def _change(stack: ExitStack, where: Any, name: str, value: Any) -> None:
    stack.enter_context(patch.object(where, name, value))
