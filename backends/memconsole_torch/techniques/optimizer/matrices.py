"""The matrices of a weight, for rules that look at whole matrices. The weight of all experts holds one matrix below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memconsole.plan.training.matrices import together


def matrices(p: Tensor, group: dict[str, Any]) -> int:
    """How many matrices a weight (rows, columns) of a group holds. `group["rows"]` is the number of rows of each; 0: all."""
    return len(p) // group["rows"] if group["rows"] else 1


def rows_at_a_time(p: Tensor, group: dict[str, Any]) -> int:
    """Rows of the matrices of a weight that are updated at a time."""
    count = matrices(p, group)
    return len(p) // count * together(count, p.numel() // count)


def in_parts(tensor: Tensor, p: Tensor, group: dict[str, Any]) -> Sequence[Tensor]:
    """Those matrices of the weight `p`, or what belongs to them of a gradient or a state whose rows are p's: views (n, rows,
    columns)."""
    count = matrices(p, group)
    several = tensor.unflatten(0, (count, -1))  # (matrices, rows, columns)
    return several.split(together(count, p.numel() // count))
