"""What the operators of a mixture of experts allocate beside their results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memconsole_torch.models import expert_products
from memconsole_torch.models.codes import decoding_bytes
from memconsole_torch.models.expert_products import Held
from memconsole_torch.tracing.trace_liveness import Workspace


def workspaces(kind: str) -> dict[Any, Workspace]:
    """By operator, on a `kind` of device."""
    of = Workspaces(kind in ("gpu", "rocm"))
    return {
        expert_products.experts_in.overload: of.of_in,
        expert_products.experts_in_backward.overload: of.of_in_backward,
        expert_products.experts_out.overload: of.of_out,
        expert_products.experts_out_backward.overload: of.of_out_backward,
    }


class Workspaces:
    """The bytes at the moment when an operator holds most. On a GPU in 16 bits the products of all experts are computed
    together."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def of_in(self, x: Tensor, picked: Tensor, gate: Tensor, scales: Any, *rest: Any) -> list[int]:
        """The token of each pair, a matrix, and its rows, which one by one are copied into the result."""
        inner, pairs = rest[-1], picked.numel()
        held = Held(gate, scales, inner, x.shape[1])
        together = self._together(x, held)
        at_once = pairs if together else self._rows(x)
        made = 0 if together else at_once * inner
        sizes = [8 * pairs, x.element_size() * at_once * x.shape[1], x.element_size() * made]
        return sizes + self._matrix(x, held)

    def of_in_backward(self, *arguments: Any) -> list[int]:
        """The gradients of rows; one by one also their sum in fp32."""
        _, _, x, order, _, gate, scales, _, _, inner, _, of_weights = arguments
        size, width, pairs = x.element_size(), x.shape[1], len(order)
        held = Held(gate, scales, inner, width)
        matrix = self._matrix(x, held)
        if self._together(x, held):
            return [8 * pairs, 2 * size * pairs * width, *matrix]
        total = [] if size == 4 else [4 * x.numel()]
        rows = self._rows(x)
        if of_weights and not matrix:
            return [8 * pairs, *total, size * rows * width, size * inner * width]
        wide = 0 if size == 4 else 4 * rows * width
        return [8 * pairs, *total, size * rows * width, wide, *matrix]

    def of_out(self, gates: Tensor, ups: Tensor, order: Tensor, *rest: Any) -> list[int]:
        """The inner values and the outputs, which one by one are added up in fp32."""
        _, shares, down, scales, width = rest
        size, inner, pairs = gates.element_size(), gates.shape[1], len(order)
        held = Held(down, scales, width, inner)
        matrix = self._matrix(gates, held)
        if self._together(gates, held):
            return [size * pairs * inner, size * pairs * width, *matrix]
        rows = self._rows(shares)
        narrow = [] if size == 4 else [4 * len(shares) * width, 4 * rows * width]
        return [12 * pairs, size * rows * inner, size * rows * width, *narrow, *matrix]

    def of_out_backward(self, gradient: Tensor, gates: Tensor, *rest: Any) -> list[int]:
        """Rows of the gradient, the inner values and their gradient."""
        *_, down, scales, _ = rest
        size, (pairs, inner), width = gates.element_size(), gates.shape, gradient.shape[1]
        held = Held(down, scales, width, inner)
        matrix = self._matrix(gates, held)
        rows = pairs if self._together(gates, held) else self._rows(gradient)
        return [16 * pairs, size * rows * width, 2 * size * rows * inner, *matrix]

    def _rows(self, x: Tensor) -> int:
        return min(expert_products.ROWS, len(x))

    def _matrix(self, x: Tensor, held: Held) -> list[int]:
        """A matrix in the type of x, or those of all experts, and what decoding it takes; nothing if it is stored so."""
        if held.scales is None and held.weight.dtype == x.dtype:
            return []
        count = held.experts if self._together(x, held) else 1
        found = [x.element_size() * count * held.rows * held.inputs]
        if held.scales is not None:
            found += decoding_bytes(held.weight, held.rows * held.inputs)
        return found

    def _together(self, x: Tensor, held: Held) -> bool:
        whole = expert_products.aligned(held.rows, held.inputs)
        return self._on_gpu and x.element_size() == 2 and whole
