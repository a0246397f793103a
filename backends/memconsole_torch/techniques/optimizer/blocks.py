"""Encodes whole tensors in 8 bits, as `memconsole_trainer.techniques.blockwise` specifies, with the
largest element of each block exact.

A block's scale has the sign of its largest element, so this element becomes 1, which is a value of the
map. Therefore decoded numbers can be encoded again without a further error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from memconsole_trainer.techniques import blockwise
from memconsole_trainer.techniques.blockwise import BLOCK

CPU_SLICE = 2**17
"""Elements that are encoded or decoded at a time, on a CPU."""
DEVICE_SLICE = 2**22
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Codes:
    """A tensor of n elements in 8 bits."""

    codes: Tensor
    """(n,) uint8"""
    scales: Tensor
    """(blocks,) fp32"""
    signed: bool


@torch.no_grad()
def encode(tensor: Tensor, *, signed: bool) -> Codes:
    """The codes of a contiguous fp32 tensor, on its device."""
    flat = tensor.view(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(blockwise.scales_of(flat.numel()), device=flat.device)
    table = _lookup(signed, flat.device)
    for start, stop in _slices(flat):
        part = flat[start:stop]
        blocks = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))[:, 0]
        scales[start // BLOCK : blockwise.scales_of(stop)] = largest
        reciprocals = torch.where(largest.abs() < _TINY, 0.0, largest.reciprocal())
        scaled = (blocks * reciprocals[:, None]).view(-1)[: part.numel()]
        rows = ((scaled.view(torch.int32) + blockwise.HALF) >> 16) + blockwise.OFFSET
        codes[start:stop] = table.index_select(0, rows)
    return Codes(codes, scales, signed)


@torch.no_grad()
def decode(encoded: Codes, out: Tensor) -> Tensor:
    """Write the numbers that codes stand for into `out`, a contiguous fp32 tensor."""
    flat = out.view(-1)
    table = _values(encoded.signed, encoded.codes.device)
    for start, stop in _slices(flat):
        rows = encoded.codes[start:stop].int()
        scales = encoded.scales[start // BLOCK : blockwise.scales_of(stop)]
        repeated = scales.repeat_interleave(BLOCK)[: stop - start]
        flat[start:stop] = table.index_select(0, rows) * repeated
    return out


def _slices(flat: Tensor) -> list[tuple[int, int]]:
    size = CPU_SLICE if flat.device.type == "cpu" else DEVICE_SLICE
    return [(i, min(i + size, flat.numel())) for i in range(0, flat.numel(), size)]


@cache
def _values(signed: bool, device: torch.device) -> Tensor:
    return torch.from_numpy(blockwise.values(signed=signed)).to(device)


@cache
def _lookup(signed: bool, device: torch.device) -> Tensor:
    return torch.from_numpy(blockwise.lookup(signed=signed)).to(device)
