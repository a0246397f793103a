"""How far the backward pass goes: through the frozen weights above the lowest trained one, not below it."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from memconsole.plan.models.model import Model, Role

MULTIPLIED: tuple[Role, ...] = ("input", "matrix", "router", "experts", "head")
"""Roles of weights that inputs are multiplied by. Embedding tables are only looked up."""


class Flow(msgspec.Struct, frozen=True):
    """What the backward pass reaches."""

    blocks: int
    """Blocks through which gradients pass."""
    inputs: int
    """Numbers per position that the trained matrices of the blocks read. Only their gradients need them."""
    lowest: int
    """Elements of the trained weights in the lowest of these blocks, which the backward pass reaches last."""
    below: bool
    """Whether a weight before the blocks is trained, so that the input of the first block has a gradient."""
    table: bool
    """Whether the embedding is trained."""
    head: bool
    """Whether the matrix that makes the outputs is trained: the head, or the embedding if there is no head."""
    passes: float
    """Operations of the forward and the backward pass, divided by those of the forward pass: 3 if all is trained.
    A frozen matrix has no gradient of its own, and nothing below the lowest trained weight has any."""


@lru_cache(maxsize=1024)
def flow_of(model: Model, frozen: tuple[str, ...], adapted: bool) -> Flow:
    """The flow past the weights called `frozen`. `adapted`: every matrix of the blocks has a trained adapter."""
    weights = tuple(p for p in model.parameters() if p.used)
    apart = frozenset(frozen)
    reaching = [p.name not in apart or (adapted and p.role == "matrix") for p in weights]
    first = reaching.index(True) if True in reaching else len(weights)
    above = weights[first:]
    reached = {p.layer for p in above if p.layer is not None}
    trained = [p for p in above if p.name not in apart]
    lowest = min(reached, default=None)
    roles = {p.role for p in trained if p.layer is None}
    last: Role = "head" if any(p.role == "head" for p in weights) else "embedding"
    multiplied = sum(p.size for p in weights if p.role in MULTIPLIED)
    through = sum(p.size for p in above if p.role in MULTIPLIED)
    updated = sum(p.size for p in trained if p.role in MULTIPLIED)
    return Flow(
        blocks=len(reached),
        inputs=sum(p.shape[-1] for p in trained if p.role == "matrix"),
        lowest=sum(p.size for p in trained if p.layer is not None and p.layer == lowest),
        below=bool(trained) and trained[0].layer is None and len(reached) == model.layers,
        table="embedding" in roles,
        head=last in roles,
        passes=1 + (through + updated) / max(1, multiplied),
    )
