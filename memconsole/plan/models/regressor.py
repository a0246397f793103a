"""The regression transformer: predicts a vector at the last step of a window of vectors.

Post-norm blocks (Vaswani et al. 2017, section 3.1) with causal attention; the last position is
projected to the outputs. The shape of the universal LQR controller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from memconsole.plan.models.model import Parameter, Role


class Regressor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A post-norm transformer from windows `(length, features)` to vectors `(outputs,)`."""

    features: int
    outputs: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    max_positions: int
    norm_eps: float = 1e-6
    position_std: float = 0.02

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads

    def parameters(self) -> Iterator[Parameter]:
        """Input projection, positions, blocks, output projection. Matrices start with standard
        deviation 1 / sqrt(inputs) (LeCun et al. 1998, section 4.6), biases at zero."""
        width = self.hidden_size
        yield from _linear("input", width, self.features, "input", None)
        shape = (self.max_positions, width)
        yield Parameter("positions.weight", shape, "position", std=self.position_std)
        for layer in range(self.layers):
            at = f"layers.{layer}"
            for name in ("query", "key", "value", "output"):
                yield _matrix(f"{at}.attention.{name}", width, width, "matrix", layer)
            yield from _norm(f"{at}.attention_norm", width, layer)
            yield from _linear(f"{at}.mlp.up", self.intermediate_size, width, "matrix", layer)
            yield from _linear(f"{at}.mlp.down", width, self.intermediate_size, "matrix", layer)
            yield from _norm(f"{at}.mlp_norm", width, layer)
        yield from _linear("head", self.outputs, width, "head", None)


def _matrix(name: str, out: int, into: int, role: Role, layer: int | None) -> Parameter:
    std = 1 / math.sqrt(into)
    return Parameter(f"{name}.weight", (out, into), role, layer, std=std)


def _linear(name: str, out: int, into: int, role: Role, layer: int | None) -> Iterator[Parameter]:
    yield _matrix(name, out, into, role, layer)
    yield Parameter(f"{name}.bias", (out,), "bias", layer)


def _norm(name: str, width: int, layer: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), "norm", layer, fill=1.0)
    yield Parameter(f"{name}.bias", (width,), "bias", layer)
