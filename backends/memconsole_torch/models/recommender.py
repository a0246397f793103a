"""The recommender in torch: a table of items, an adapter, and the blocks of a decoder.

Module names spell the canonical parameter names of `memconsole.plan.models.recommender`. The adapter and
the scores are fp32 in any autocast precision. All items are projected once for each micro-batch,
because they are inputs and classes at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memconsole.plan.models.recommender import Recommender as Shape
from memconsole_torch.models.decoder import Block, run_blocks
from memconsole_torch.models.linear import linear
from memconsole_torch.models.norms import Norm
from memconsole_torch.models.table import table


class Projected(NamedTuple):
    """Final hidden states (B, T, H), and the projected items and clusters that they are scored against, all fp32."""

    hidden: Tensor
    members: Tensor
    """The items of each cluster (C, M, H)."""
    clusters: Tensor
    """The clusters (C, H)."""


class Recommender(nn.Module):
    """Maps items (B, T) to `Projected`."""

    def __init__(self, model: Shape) -> None:
        super().__init__()
        a = model.decoder
        self.model = model
        self.items = table(model.rows, model.embedding_size)
        self.clusters = table(model.clusters, model.embedding_size)
        self.adapter = Adapter(model)
        if a.positions == "learned":
            self.positions = table(a.max_positions, a.hidden_size)
        self.layers = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = Norm(a, a.hidden_size)

    def forward(self, items: Tensor) -> Projected:
        a = self.model.decoder
        projected = self.projected(self.items.weight)  # (rows, H)
        hidden = self.norm(run_blocks(a, self.layers, self.embed(items, projected))).float()
        members = projected[1:].view(self.model.clusters, -1, a.hidden_size)
        return Projected(hidden, members, self.projected(self.clusters.weight))

    def embed(self, items: Tensor, projected: Tensor) -> Tensor:
        """Input of the first block (B, T, H), from items (B, T) and the projected table (rows, H)."""
        a = self.model.decoder
        x = F.embedding(items, projected)
        if a.embedding_scale != 1.0:
            x = x * a.embedding_scale
        if a.positions == "learned":
            x = x + self.positions.weight[: items.shape[1]]
        return x

    def projected(self, rows: Tensor) -> Tensor:
        """Rows (n, embedding) through the adapter (n, H). The backward pass computes it again, so that the
        hidden layer of all items is not kept."""
        if not torch.is_grad_enabled():
            found: Tensor = self.adapter(rows)
            return found
        found = checkpoint(self.adapter, rows, use_reentrant=False, preserve_rng_state=False)
        return found


class Adapter(nn.Module):
    """``gelu(down(gelu(up(x))))`` in fp32."""

    def __init__(self, model: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(model.embedding_size, model.adapter_size)
        self.down = nn.Linear(model.adapter_size, model.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            for layer in (self.up, self.down):
                x = linear(x, layer.weight.float(), layer.bias.float())
                x = F.gelu(x, approximate="tanh")
            return x
