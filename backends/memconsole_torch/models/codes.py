"""Decodes matrices that are stored as 8- or 4-bit codes, as `memconsole_trainer.techniques.base_storage` specifies."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from memconsole_torch.kernels import decoding, launch
from memconsole_trainer.techniques.base_storage import BLOCK, pairs

CPU_SLICE = 2**17
"""Elements decoded at a time on a CPU, so that temporaries stay in the processor's cache."""
DEVICE_SLICE = 2**22
"""Elements decoded at a time on other devices, where each slice costs some five kernel launches."""


def decoded(codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Decode the matrix to `dtype`, rounded from its fp32 values."""
    blocks = codes.shape[0]
    whole = torch.empty(blocks, BLOCK, dtype=dtype, device=codes.device)
    if launch.runs_on(codes.device):
        decoding.decode(codes, scales, _pairs(codes.device), whole)
        return whole.view(-1)[: shape[0] * shape[1]].view(shape)
    most = (CPU_SLICE if codes.device.type == "cpu" else DEVICE_SLICE) // BLOCK
    for part in _slices(blocks, most):
        values = _values(codes[part])
        if dtype == torch.float32:
            torch.mul(values, scales[part, None], out=whole[part])
        else:
            whole[part].copy_(values.mul_(scales[part, None]))
        del values
    return whole.view(-1)[: shape[0] * shape[1]].view(shape)


def decoded_part(
    codes: Tensor, scales: Tensor, start: int, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Decode the elements from number `start` on, as a matrix."""
    size = math.prod(shape)
    blocks = slice(start // BLOCK, -(-(start + size) // BLOCK))
    first = start - blocks.start * BLOCK
    whole = (blocks.stop - blocks.start, BLOCK)
    found = decoded(codes[blocks], scales[blocks], whole, dtype)
    return found.view(-1)[first : first + size].view(shape)


def decoding_bytes(codes: Tensor, size: int) -> list[int]:
    """The bytes of temporaries while at least `size` elements are decoded."""
    if launch.runs_on(codes.device):
        return []
    most = min(size, CPU_SLICE if codes.device.type == "cpu" else DEVICE_SLICE)
    return [4 * most] if codes.shape[1] == BLOCK else [4 * most, 2 * most]


def _values(codes: Tensor) -> Tensor:
    """fp32 values (blocks, BLOCK) of codes, without their scales."""
    if codes.shape[1] == BLOCK:
        return codes.view(torch.int8).float()
    return _pairs(codes.device).index_select(0, codes.view(-1).int()).view(-1, BLOCK)


def _slices(blocks: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, blocks, most))


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    return torch.from_numpy(pairs()).to(device)
