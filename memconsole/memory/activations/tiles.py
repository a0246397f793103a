"""The tiles of `optimize.tiled_mlp` in one plan's step."""

from __future__ import annotations

from memconsole.memory.state.step_sizes import StepSizes
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.tiles import tile_size, tile_tokens
from memconsole.plan.plan import Plan


def tile_of(step: StepSizes, tokens: int) -> int:
    """How many of a micro-batch's `tokens` an MLP computes at a time; 0 if all."""
    a = step.architecture
    if not computes_in_tiles(step.plan, a, tokens):
        return 0
    return tile_size(tokens, tile_tokens(a.hidden_size))


def computes_in_tiles(plan: Plan, a: Architecture, tokens: int) -> bool:
    """Whether blocks compute the MLP of a micro-batch's `tokens` in tiles. Experts never do, and no plan has tiles and
    selective checkpointing."""
    o = plan.optimize
    if not o.tiled_mlp or a.experts or o.gradient_checkpointing == "selective":
        return False
    return tokens > tile_tokens(a.hidden_size)
