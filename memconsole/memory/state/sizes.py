"""Counts the elements of each part of a model, once per model, from the list of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from memconsole.plan.models.model import (
    ORTHOGONALIZED,
    STORED_MATRICES,
    TABLES,
    Model,
    Parameter,
    Role,
)
from memconsole.plan.sections.optimize import LoraTargets
from memconsole.plan.training.matrices import together
from memconsole.plan.training.trained import has_adapter

QUANTIZED_FROM = 4096
"""Smaller tensors keep 32-bit optimizer state (bitsandbytes `min_8bit_size`)."""
STORAGE_BLOCK = 64
"""Elements of a frozen matrix sharing one fp32 scale (`memconsole_trainer.techniques.base_storage.BLOCK`)."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over some weights, in elements."""

    elements: int = 0
    tensors: int = 0
    largest: int = 0
    pair: int = 0
    """The largest sum of a matrix and its predecessor in the list of weights."""
    pair_twice: int = 0
    """The same with the matrix counted twice."""
    quantizable: int = 0
    """Elements of those matrices of the blocks that have at least 4096 elements: only their state is stored in 8 bits."""
    tables: int = 0
    """The same count for embedding, positions and head, whose state keeps 32 bits unless adamw8-all is chosen."""
    orthogonal: int = 0
    """Elements of matrices that Muon orthogonalizes."""
    orthogonalizing: int = 0
    """Elements live at once while Muon processes the largest matrix, or several small ones of a weight together: two
    updates, and a square of the short side."""
    together: int = 0
    """The most elements that a rule of whole matrices updates at a time."""
    several: int = 0
    """Elements of the largest weight that holds several matrices."""
    small: int = 0
    """Elements of norms and biases, which stay in fp32 whatever the precision."""
    coded_blocks: int = 0
    """Blocks of matrices that a quantized frozen base stores in codes."""
    factored: int = 0
    """Adafactor second moments: rows + columns of matrices, every element of vectors
    (Shazeer & Stern 2018, algorithm 4)."""
    projected: int = 0
    """Elements of matrices that APOLLO-Mini projects to rank 1."""
    projections: int = 0
    """Elements of its state of them: two moments as long as a matrix's longer side, and a norm."""
    sides: tuple[int, ...] = ()
    """(in, out) of one matrix that has an adapter; empty for several weights."""
    adapted: int = 0
    """Number of matrices that have adapters."""
    adapter_width: int = 0
    """Sum of in + out over the matrices with adapters. Multiplied by the rank it gives the adapters' elements."""
    adapter_largest: int = 0
    """The longest of those in or out sizes."""

    def plus(self, other: Group, times: int = 1) -> Group:
        """This group and `times` copies of the other."""
        return Group(
            elements=self.elements + times * other.elements,
            tensors=self.tensors + times * other.tensors,
            largest=max(self.largest, other.largest),
            pair=max(self.pair, other.pair),
            pair_twice=max(self.pair_twice, other.pair_twice),
            quantizable=self.quantizable + times * other.quantizable,
            tables=self.tables + times * other.tables,
            orthogonal=self.orthogonal + times * other.orthogonal,
            orthogonalizing=max(self.orthogonalizing, other.orthogonalizing),
            together=max(self.together, other.together),
            several=max(self.several, other.several),
            small=self.small + times * other.small,
            coded_blocks=self.coded_blocks + times * other.coded_blocks,
            factored=self.factored + times * other.factored,
            projected=self.projected + times * other.projected,
            projections=self.projections + times * other.projections,
            sides=() if self.tensors else other.sides,
            adapted=self.adapted + times * other.adapted,
            adapter_width=self.adapter_width + times * other.adapter_width,
            adapter_largest=max(self.adapter_largest, other.adapter_largest),
        )


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """A model's weights by what training does with them."""

    block: Group
    """One block; every block is alike."""
    block_matrices: int
    """Elements of one block's matrices, those of its experts included."""
    block_experts: int
    """Elements of the matrices of all experts of one block."""
    outside: Group
    """Used weights outside the blocks: embeddings, input projection, positions, final norm, head."""
    used: Group
    """Everything the loss reaches."""
    unused: int
    """Elements kept and saved but never trained."""
    order: tuple[Group, ...]
    """The used weights one by one, with only as many blocks as needed to see which weight follows which."""
    embedding: int
    head: int
    """Elements of a separate head; 0 when tied."""
    small: int
    """Elements of norms and biases, which stay in fp32 whatever the precision."""
    layers: int

    @property
    def total(self) -> int:
        return self.used.elements + self.unused

    @property
    def head_matrix(self) -> int:
        """Elements of the matrix that makes logits, tied or not."""
        return self.head or self.embedding


def coded_bytes(storage: str, blocks: int) -> int:
    """Bytes of `blocks` blocks of codes, including their scales."""
    return blocks * (STORAGE_BLOCK * (8 if storage == "int8" else 4) // 8 + 4)


@lru_cache(maxsize=256)
def sizes(model: Model) -> Sizes:
    """Count a model's weights."""
    weights = tuple(model.parameters())
    block = tuple(p for p in weights if p.layer == 0)
    rest = tuple(p for p in weights if p.layer is None)
    last = max((p.size for p in block), default=0)
    before_head = tuple(p for p in rest if p.used and p.role != "head")
    head = tuple(p for p in rest if p.role == "head")
    outside = group(before_head).plus(group(head, before=last))
    one = group(block, before=last)
    return Sizes(
        block=one,
        block_matrices=_of(block, "matrix") + _of(block, "experts"),
        block_experts=_of(block, "experts"),
        outside=outside,
        used=outside.plus(one, model.layers),
        order=order(weights),
        unused=sum(p.size for p in rest if not p.used),
        embedding=_of(rest, "embedding"),
        head=_of(rest, "head"),
        small=_small(rest) + model.layers * _small(block),
        layers=model.layers,
    )


@lru_cache(maxsize=256)
def adapted_block(model: Model, targets: LoraTargets) -> Group:
    """The matrices of one block that have adapters."""
    return group(p for p in model.parameters() if p.layer == 0 and has_adapter(p, targets))


def order(weights: Iterable[Parameter]) -> tuple[Group, ...]:
    """The used weights one by one, with only as many blocks as needed to see which weight follows which."""
    return tuple(group([p]) for p in weights if p.used and (p.layer is None or p.layer < 2))


def orthogonalizing(shape: tuple[int, ...]) -> int:
    """Elements live at once while Muon processes a matrix of this shape: two updates, and a square of the short side."""
    return 2 * math.prod(shape) + min(shape) ** 2


def _of(weights: Iterable[Parameter], role: Role) -> int:
    return sum(p.size for p in weights if p.role == role)


def _small(weights: Iterable[Parameter]) -> int:
    return sum(p.size for p in weights if p.role in ("norm", "bias"))


def group(weights: Iterable[Parameter], before: int = 0) -> Group:
    """Totals of weights that follow a matrix of `before` elements."""
    total = Group()
    for p in weights:
        matrix, large = p.role == "matrix", p.size >= QUANTIZED_FROM
        held, orthogonal = p.role in STORED_MATRICES, p.role in ORTHOGONALIZED
        at_once = together(p.matrices, math.prod(p.matrix_shape))
        total = total.plus(
            Group(
                elements=p.size,
                tensors=1,
                largest=p.size,
                pair=p.size + before if len(p.shape) > 1 else 0,
                pair_twice=2 * p.size + before if len(p.shape) > 1 else 0,
                quantizable=p.size if held and large else 0,
                tables=p.size if p.role in TABLES and large else 0,
                orthogonal=p.size if orthogonal else 0,
                orthogonalizing=at_once * orthogonalizing(p.matrix_shape) if orthogonal else 0,
                together=at_once * math.prod(p.matrix_shape),
                several=p.size if p.matrices > 1 else 0,
                small=p.size if p.role in ("norm", "bias") else 0,
                coded_blocks=-(-p.size // STORAGE_BLOCK) if held else 0,
                factored=p.matrices * sum(p.matrix_shape),
                projected=p.size if held else 0,
                projections=p.matrices * (2 * max(p.matrix_shape) + 1) if held else 0,
                sides=p.shape[::-1] if matrix else (),
                adapted=int(matrix),
                adapter_width=sum(p.shape) if matrix else 0,
                adapter_largest=max(p.shape) if matrix else 0,
            )
        )
        before = p.size if len(p.shape) > 1 else before
    return total
