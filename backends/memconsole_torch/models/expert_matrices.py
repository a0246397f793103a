"""The matrices of all experts as they are stored, and whether one call can multiply by all of them.

Letters: E experts, K input width of an expert's matrix.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memconsole_torch.models.codes import decoded, decoded_part
from memconsole_trainer.techniques.base_storage import BLOCK

ALIGNED = 8
"""Widths of rows that `grouped_mm` takes are multiples of this: in 16 bits a row must begin at a multiple of 16 bytes."""


class ExpertMatrices(NamedTuple):
    """One matrix (rows, K) of each expert, stored as one weight (E * rows, K), or as codes and their scales."""

    weight: Tensor
    """The weight, or its codes."""
    scales: Tensor | None
    """The scales of the codes; None if the weight is not stored as codes."""
    rows: int
    """Rows of one expert's matrix."""
    inputs: int
    """K."""

    @property
    def experts(self) -> int:
        """The number of experts."""
        if self.scales is None:
            return len(self.weight) // self.rows
        return len(self.weight) * BLOCK // (self.rows * self.inputs)

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The matrix (rows, K) of one expert."""
        if self.scales is None:
            return self.weight[expert * self.rows : (expert + 1) * self.rows].to(dtype)
        shape = self.rows, self.inputs
        start = expert * self.rows * self.inputs
        return decoded_part(self.weight, self.scales, start, shape, dtype)

    def all(self, dtype: torch.dtype) -> Tensor:
        """The matrices of all experts (E, rows, K)."""
        if self.scales is None:
            return self.weight.to(dtype).view(-1, self.rows, self.inputs)
        shape = self.experts * self.rows, self.inputs
        return decoded(self.weight, self.scales, shape, dtype).view(-1, self.rows, self.inputs)


def grouped(x: Tensor, width: int) -> bool:
    """Whether one call computes the products of all experts, from rows x (P, K) to rows of `width` elements."""
    return aligned(x.shape[1], width) and has_grouped(x.device, x.dtype)


def aligned(*widths: int) -> bool:
    """Whether rows of these widths begin where `grouped_mm` can read them."""
    return all(width % ALIGNED == 0 for width in widths)


@lru_cache(maxsize=8)
def has_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `grouped_mm` gives right products in this 16-bit type on this GPU. It is tried with small matrices, once for
    each device and type. False on other devices and in other types."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    try:
        rows, ends = torch.randn(32, 16, device=device).to(dtype), [8, 8, 32]
        weights = torch.randn(3, 24, 16, device=device).to(dtype)
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        y = F.grouped_mm(rows, weights.mT, offs=offsets)
        expected_y = torch.cat((rows[:8] @ weights[0].T, rows[8:] @ weights[2].T))
        by_weights = F.grouped_mm(y.mT, rows, offs=offsets)
        expected = y[:8].mT @ rows[:8], torch.zeros_like(weights[1]), y[8:].mT @ rows[8:]
        return bool(
            torch.allclose(y, expected_y, 0.05, 0.5)
            and torch.allclose(by_weights, torch.stack(expected), 0.05, 1.0)
        )
    except (AttributeError, RuntimeError):
        return False
