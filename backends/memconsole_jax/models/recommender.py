"""The recommender as Flax NNX modules: a table of items, an adapter, and the blocks of a decoder.

The adapter and the scores are float32. All items are projected once for each micro-batch, because
they are inputs and classes at the same time.

Letters in shapes: B batch, T sequence, H hidden, C clusters, M places of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from memconsole.plan.models.recommender import Recommender as Shape
from memconsole_jax.models import dropout
from memconsole_jax.models.accumulation import Sums
from memconsole_jax.models.blocks import BlockRunning, assembled, stacked
from memconsole_jax.models.decoder import Block, build_norm, run_decoder_blocks
from memconsole_jax.models.layers import Embedding, Linear, lookup


class Projected(NamedTuple):
    """Final hidden states (B, T, H), and the projected items and clusters that they are scored against, all float32."""

    hidden: Array
    members: Array
    """The items of each cluster (C, M, H)."""
    clusters: Array
    """The clusters (C, H)."""


class Adapter(nnx.Module):
    """``gelu(down(gelu(up(x))))`` in float32."""

    def __init__(self, model: Shape) -> None:
        self.up = Linear(model.embedding_size, model.adapter_size, bias=True)
        self.down = Linear(model.adapter_size, model.hidden_size, bias=True)

    def __call__(self, x: Array) -> Array:
        """Map rows (n, embedding) to (n, H)."""
        for layer in (self.up, self.down):
            assert layer.bias is not None
            weight, bias = (w[...].astype(jnp.float32) for w in (layer.weight, layer.bias))
            x = jax.nn.gelu(x @ weight.T + bias, approximate=True)
        return x


class Recommender(nnx.Module):
    """Maps items (B, T) to `Projected`."""

    def __init__(self, model: Shape) -> None:
        a = model.decoder
        self.model = model
        self.items = Embedding(model.rows, model.embedding_size)
        self.clusters = Embedding(model.clusters, model.embedding_size)
        self.adapter = Adapter(model)
        learned = a.positions == "learned"
        self.positions = Embedding(a.max_positions, a.hidden_size) if learned else None
        self.layers = stacked(a.layers, lambda: Block(a))  # weights (L, ...)
        self.norm = build_norm(a, a.hidden_size)

    def __call__(
        self,
        items: Array,
        dtype: Any = jnp.float32,
        running: BlockRunning | None = None,
        sums: Sums | None = None,
    ) -> Projected:
        """`running` and `sums` are as in `decoder.Decoder.body`."""
        a = self.model.decoder
        projected = self.projected(self.items.weight[...])  # (rows, H)
        x = lookup(projected, items)  # (B, T, H)
        if a.embedding_scale != 1.0:
            x = x * a.embedding_scale
        if self.positions is not None:
            x = x + self.positions(jnp.arange(items.shape[1]))
        x = dropout.residual(x)
        x = run_decoder_blocks(a, self.layers, x, dtype, running, None, sums)
        hidden = self.norm(x).astype(dtype).astype(jnp.float32)
        members = projected[1:].reshape(self.model.clusters, -1, a.hidden_size)
        return Projected(hidden, members, self.projected(self.clusters.weight[...]))

    def projected(self, rows: Array) -> Array:
        """Rows (n, embedding) through the adapter (n, H). The backward pass computes it again, so
        that the hidden layer of all items is not kept."""
        return jax.checkpoint(self.adapter)(rows.astype(jnp.float32))


def assemble(model: Shape, weights: Mapping[str, Any]) -> Recommender:
    """The model with `weights`, which have stacked names (see `stacking`). Nothing is copied."""
    return assembled(Recommender, model, weights)
