"""The matrices of a weight, for rules that need whole matrices (Muon, Adafactor). The weight of a layer's experts holds their
matrices one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memconsole.plan.training.matrices import together


def matrices(p: Tensor, group: dict[str, Any]) -> int:
    """How many matrices a weight (rows, columns) of a group holds. `group["rows"]` is the number of rows of each, or 0 if the
    weight is one matrix."""
    return len(p) // group["rows"] if group["rows"] else 1


def rows_at_a_time(p: Tensor, group: dict[str, Any]) -> int:
    """How many rows of a weight are updated together: those of one or more whole matrices."""
    count = matrices(p, group)
    return len(p) // count * together(count, p.numel() // count)


def in_parts(tensor: Tensor, p: Tensor, group: dict[str, Any]) -> Sequence[Tensor]:
    """Views (n, rows, columns) of the matrices in `tensor` that are updated together. `tensor` is the weight `p`, its gradient
    or a state of it, with as many matrices."""
    count = matrices(p, group)
    stacked = tensor.unflatten(0, (count, -1))  # (matrices, rows, columns)
    return stacked.split(together(count, p.numel() // count))
