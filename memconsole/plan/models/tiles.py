"""How many tokens of a block's MLP are computed at a time with `optimize.tiled_mlp`."""

from __future__ import annotations

LEAST_TOKENS = 1024
"""Tokens of the smallest tile. With fewer, a GPU's products take longer than their operations need."""


def tile_tokens(hidden_size: int) -> int:
    """The most tokens in a tile: as many as the stream is wide, as Bekman et al. 2025 (arXiv:2506.13996) cut the
    MLP, but at least `LEAST_TOKENS`. Each tile reads all weights of the MLP, so tiles grow with them."""
    return max(LEAST_TOKENS, hidden_size)


def tile_size(tokens: int, most: int) -> int:
    """The tokens of each tile if `tokens` are cut into the fewest tiles of at most `most` tokens. The last tile may have
    fewer."""
    return -(-tokens // -(-tokens // most))
