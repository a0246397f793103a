"""The MLP of a block computed for a few tokens at a time (`optimize.tiled_mlp`); see `memconsole_jax.models.tiles`."""

from __future__ import annotations

from memconsole.plan.models.tiles import tile_tokens
from memconsole.plan.plan import Plan
from memconsole_jax.models.decoder import Decoder
from memconsole_jax.models.layers import MLP, Tiling


def apply(plan: Plan, decoder: Decoder) -> None:
    """Make the MLPs of `decoder` run in tiles, if the plan says so. Experts run in tiles of their own."""
    mlp = decoder.layers.mlp
    if plan.optimize.tiled_mlp and isinstance(mlp, MLP):
        most = tile_tokens(decoder.architecture.hidden_size)
        mlp.tiling = Tiling(most, adapters_only=plan.optimize.lora_rank > 0)
