"""What the operators of a mixture of experts allocate beside their results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memconsole_torch.models import expert_matrices, expert_products
from memconsole_torch.models.codes import decoding_bytes
from memconsole_torch.models.expert_matrices import ExpertMatrices
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
        matrices = ExpertMatrices(gate, scales, inner, x.shape[1])
        together = self._together(x, matrices)
        at_once = pairs if together else self._rows(x)
        made = 0 if together else at_once * inner
        sizes = [8 * pairs, x.element_size() * at_once * x.shape[1], x.element_size() * made]
        return sizes + self._matrix(x, matrices)

    def of_in_backward(self, *arguments: Any) -> list[int]:
        """The gradients of rows; one by one also their sum in fp32."""
        _, _, x, order, _, gate, scales, _, _, inner, _, of_weights = arguments
        size, width, pairs = x.element_size(), x.shape[1], len(order)
        matrices = ExpertMatrices(gate, scales, inner, width)
        temporary = self._matrix(x, matrices)
        if self._together(x, matrices):
            return [8 * pairs, 2 * size * pairs * width, *temporary]
        total = [] if size == 4 else [4 * x.numel()]
        rows = self._rows(x)
        if of_weights and not temporary:
            return [8 * pairs, *total, size * rows * width, size * inner * width]
        wide = 0 if size == 4 else 4 * rows * width
        return [8 * pairs, *total, size * rows * width, wide, *temporary]

    def of_out(self, gates: Tensor, ups: Tensor, order: Tensor, *rest: Any) -> list[int]:
        """The inner values and the outputs, which one by one are added up in fp32."""
        _, shares, down, scales, width = rest
        size, inner, pairs = gates.element_size(), gates.shape[1], len(order)
        matrices = ExpertMatrices(down, scales, width, inner)
        temporary = self._matrix(gates, matrices)
        if self._together(gates, matrices):
            return [size * pairs * inner, size * pairs * width, *temporary]
        rows = self._rows(shares)
        narrow = [] if size == 4 else [4 * len(shares) * width, 4 * rows * width]
        return [12 * pairs, size * rows * inner, size * rows * width, *narrow, *temporary]

    def of_out_backward(self, gradient: Tensor, gates: Tensor, *rest: Any) -> list[int]:
        """Rows of the gradient, the inner values and their gradient."""
        *_, down, scales, _ = rest
        size, (pairs, inner), width = gates.element_size(), gates.shape, gradient.shape[1]
        matrices = ExpertMatrices(down, scales, width, inner)
        temporary = self._matrix(gates, matrices)
        rows = pairs if self._together(gates, matrices) else self._rows(gradient)
        return [16 * pairs, size * rows * width, 2 * size * rows * inner, *temporary]

    def _rows(self, x: Tensor) -> int:
        return min(expert_products.ROWS, len(x))

    def _matrix(self, x: Tensor, matrices: ExpertMatrices) -> list[int]:
        """A matrix in the type of x, or those of all experts, and what decoding it takes; nothing if it is stored so."""
        if matrices.scales is None and matrices.weight.dtype == x.dtype:
            return []
        count = matrices.experts if self._together(x, matrices) else 1
        found = [x.element_size() * count * matrices.rows * matrices.inputs]
        if matrices.scales is not None:
            found += decoding_bytes(matrices.weight, matrices.rows * matrices.inputs)
        return found

    def _together(self, x: Tensor, matrices: ExpertMatrices) -> bool:
        whole = expert_matrices.aligned(matrices.rows, matrices.inputs)
        return self._on_gpu and x.element_size() == 2 and whole
