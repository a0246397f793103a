"""Sizes of a recommender's two-level softmax that both backends share."""

from __future__ import annotations

from memconsole.plan.recommender import Recommender

ABSENT = -1e9
"""The logit of a place of a cluster that holds no item."""
CHUNK_BYTES = 32 << 20
"""Most bytes of the fp32 items that a chunk of positions is scored against, or of their scores."""


def chunk_positions(model: Recommender) -> int:
    """Positions whose loss is computed at a time. Each reads the items of its target's cluster."""
    return max(1, CHUNK_BYTES // (4 * model.cluster_size * model.hidden_size))


def scored_positions(model: Recommender) -> int:
    """Positions whose scores of all items are computed at a time."""
    return max(1, CHUNK_BYTES // (4 * model.rows))
