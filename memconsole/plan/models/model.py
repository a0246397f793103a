"""The interface of a model: a list of weights, some of them in blocks that repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

Role = Literal[
    "embedding",
    "position",
    "norm",
    "bias",
    "input",
    "matrix",
    "router",
    "experts",
    "head",
    "auxiliary",
    "adapter",
]
"""What a weight is, which decides how it is priced and updated.

- matrix: a matrix (out, in) of a block that all rows are multiplied by. Only these get adapters.
- experts: such matrices of all experts of a block, one after the other (experts * out, in). They and matrices get codes.
- router: the matrix (experts, in) of a block that decides which experts a row goes to.
- input, head: the same before and after the blocks. The outputs of the heads are those of the model.
- embedding, position: a table whose rows are looked up. Without a head, the embedding makes the outputs.
- norm, bias: kept in fp32 and never decayed.
- auxiliary: stored, and not used by the loss.
- adapter: added to a frozen matrix; never in a model's own list.
"""
STORED_MATRICES: tuple[Role, ...] = ("matrix", "experts")
"""The large weights of the blocks, which a frozen base may store as codes and 8-bit optimizers as 8-bit state."""
ORTHOGONALIZED: tuple[Role, ...] = ("matrix", "experts", "router", "adapter")
"""Those that Muon updates."""
TABLES: tuple[Role, ...] = ("embedding", "position", "input", "head")
"""Matrices outside the blocks."""


class Parameter(msgspec.Struct, frozen=True, gc=False):
    """One weight: canonical name, shape, role and initial values."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    std: float = 0.0
    """Standard deviation of the initial normal draw; 0 means the constant `fill`."""
    fill: float = 0.0
    matrices: int = 1
    """How many matrices of equal shape the weight holds, one below the other. Rules that look at whole matrices treat each by
    itself."""
    used: bool = True
    """False if no term of the text loss depends on it. Such a weight is stored and saved but never trained."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of one of its matrices; that of the weight if it is a vector."""
        return (self.shape[0] // self.matrices, *self.shape[1:])

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices and embeddings, never to norms and biases."""
        return self.role not in ("norm", "bias")


class Model(Protocol):
    """A model's shape: every weight it has, and the blocks it repeats. A frozen msgspec struct, whose type
    determines the task that it is made for."""

    @property
    def layers(self) -> int:
        """Number of blocks, named ``layers.0`` and so on. Checkpointing, offload and compilation wrap each block."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest row that it accepts."""
        ...

    def __hash__(self) -> int:
        """Models are hashable values, because they are cache keys."""
        ...

    def parameters(self) -> Iterator[Parameter]:
        """Every weight in a fixed order, for naming, counting, pricing and initializing."""
        ...
