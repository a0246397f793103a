"""What every model is to the rest of the program: a list of weights, some of them in blocks that repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

Role = Literal[
    "embedding", "position", "norm", "bias", "input", "matrix", "head", "auxiliary", "adapter"
]
TABLES: tuple[Role, ...] = ("embedding", "position", "input", "head")
"""Matrices outside the blocks."""


class Parameter(msgspec.Struct, frozen=True):
    """One weight: canonical name, shape, what it is for, and how it starts."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    std: float = 0.0
    """Standard deviation of the initial normal draw; 0 means the constant `fill`."""
    fill: float = 0.0
    used: bool = True
    """False where no term of the text loss reaches it: kept, saved, never trained."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices and embeddings, never to norms and biases."""
        return self.role not in ("norm", "bias")


class Model(Protocol):
    """A model's shape: every weight it has, and the blocks it repeats."""

    @property
    def layers(self) -> int:
        """Blocks named ``layers.0`` and on: what checkpointing, offload and compilation wrap."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest row that it takes."""
        ...

    def __hash__(self) -> int:
        """Models are values: what is made of one is remembered by it."""
        ...

    def parameters(self) -> Iterator[Parameter]:
        """Every weight in a fixed order, which names, counts, prices and initializes them."""
        ...
