"""AdamW on a GPU, in one kernel: it reads moments in 8 bits or in fp32, updates them and the weight, and stores the moments in
the format in which it read them. 8-bit moments follow `memconsole_trainer.techniques.blockwise`; they are in fp32 in registers
only."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from memconsole_torch.kernels import launch
from memconsole_trainer.techniques.blockwise import BLOCK, HALF, scales_of

BLOCKS = 4
"""Blocks of moments that each instance of the kernel updates."""
TINY = torch.finfo(torch.float32).tiny
Scalar: TypeAlias = Tensor | float
"""A float, or an fp32 scalar on the device."""


class Factors(NamedTuple):
    """The factors of an update of a weight w with its gradient g.

    The moments become m + first_share (g - m) and v + second_share (g² - v), and the weight becomes
    decay · w - step_size · m / (sqrt(v) + epsilon).
    """

    first_share: Scalar
    second_share: Scalar
    epsilon: Scalar
    decay: Scalar
    step_size: Scalar


def update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    factors: Factors,
) -> None:
    """Update a contiguous fp32 weight, and its state, in place.

    `state` holds `first` and `second`, or the codes and scales of both. `tables`: the maps of codes to numbers, without
    and with sign, and of a number's upper 16 bits to codes.
    """
    on_device = any(isinstance(factor, Tensor) for factor in factors)
    scalars = [_scalar(factor, weight.device) for factor in factors] if on_device else factors
    quantized = "first_codes" in state
    names = ("first", "second", "first", "second")  # fp32 moments have no scales, and none are read
    if quantized:
        names = ("first_codes", "second_codes", "first_scales", "second_scales")
    launch.run(
        "adamw", -(-scales_of(weight.numel()) // BLOCKS),
        weight, gradient, *(state[name] for name in names), *tables[0], *tables[1], weight.numel(),
        *scalars, factors_on_device=on_device, quantized=quantized, half=HALF, tiny=TINY, blocks=BLOCKS, block=BLOCK,
    )  # fmt: skip


def _scalar(factor: Scalar, device: torch.device) -> Tensor:
    return factor if isinstance(factor, Tensor) else torch.full((), factor, device=device)
