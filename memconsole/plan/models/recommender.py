"""The recommender: a table of items and an adapter around a decoder, with a two-level softmax.

After EfficientIDs (Subbiah et al. 2025, arXiv:2509.03746). An item is one position of the decoder.
Its row of the table goes through the adapter, ``gelu(down(gelu(up(row))))``, and the result takes
the place of a token embedding. The same projection scores the outputs: an output h gives the
cluster c the logit ``h · project(clusters[c])``, and item i of that cluster the logit
``h · project(items[i])`` (the form that the reference calls `use_item_input_dnn_everywhere`).

Item 0 is padding. Clusters have equally many places, and item ``1 + c · cluster_size + j`` is member
j of cluster c, so that ids and clusters cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Parameter

ITEMS, CLUSTERS = "items.weight", "clusters.weight"
ITEMS_JSON = "items.json"
"""The file in a run's directory that tells which item of the data each row of the table stands for."""
CHUNK_BYTES = 32 << 20
"""Most bytes of the items that a chunk of positions is scored against, or of their scores, all fp32."""


class Recommender(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    cache_hash=True,
    omit_defaults=True,
):
    """Rows of items `(length,)` to scores of all items at each position."""

    decoder: Architecture
    """Its blocks and final norm are used; its token embedding and head do not exist here."""
    items: int
    """Items that can be recommended, without padding."""
    clusters: int
    embedding_size: int
    """Numbers per row of the table."""
    adapter_size: int
    """Width of the adapter's hidden layer."""
    absent: tuple[int, ...] = ()
    """Those of the items that stand for none of the data, sorted. They have no probability and no rank."""

    @property
    def layers(self) -> int:
        return self.decoder.layers

    @property
    def max_positions(self) -> int:
        return self.decoder.max_positions

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def cluster_size(self) -> int:
        """Places of a cluster. The last clusters may have one item less than places."""
        return -(-self.items // self.clusters)

    @property
    def rows(self) -> int:
        """Rows of the table: padding, and the places of all clusters."""
        return 1 + self.clusters * self.cluster_size

    @property
    def chunk_positions(self) -> int:
        """Positions whose loss is computed at a time. Each reads the items of its target's cluster."""
        return max(1, CHUNK_BYTES // (4 * self.cluster_size * self.hidden_size))

    @property
    def scored_positions(self) -> int:
        """Positions whose scores of all items are computed at a time, in evaluation."""
        return max(1, CHUNK_BYTES // (4 * self.rows))

    def members(self, cluster: int) -> int:
        """Items of a cluster."""
        return self.items // self.clusters + (cluster < self.items % self.clusters)

    def parameters(self) -> Iterator[Parameter]:
        """The table, the clusters and the adapter, then the decoder's blocks and final norm."""
        width, inner, hidden = self.embedding_size, self.adapter_size, self.hidden_size
        std = 1 / math.sqrt(width)
        yield Parameter(ITEMS, (self.rows, width), "embedding", std=std)
        yield Parameter(CLUSTERS, (self.clusters, width), "embedding", std=std)
        yield from _linear("adapter.up", inner, width)
        yield from _linear("adapter.down", hidden, inner)
        outside = {"embedding", "head", "auxiliary"}
        for parameter in self.decoder.parameters():
            outside_blocks = parameter.layer is None and parameter.role in outside
            if not outside_blocks and not parameter.name.startswith("diagnostic_head"):
                yield parameter


def is_of_decoder(parameter: Parameter) -> bool:
    """Whether a weight of a recommender belongs to its decoder, which may be frozen."""
    return not parameter.name.startswith(("items.", "clusters.", "adapter."))


def _linear(name: str, out: int, into: int) -> Iterator[Parameter]:
    """A matrix with standard deviation sqrt(2 / (in + out)) (Glorot and Bengio 2010, eq. 12)."""
    yield Parameter(f"{name}.weight", (out, into), "input", std=math.sqrt(2 / (into + out)))
    yield Parameter(f"{name}.bias", (out,), "bias")
