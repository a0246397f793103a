"""What a recommender holds besides its decoder's blocks: projected items, and chunks of scores."""

from __future__ import annotations

from memconsole.plan.models.recommender import Recommender


def projected_bytes(model: Recommender) -> int:
    """All items and clusters after the adapter, fp32: inputs, and what outputs are scored against."""
    return 4 * (model.rows + model.clusters) * model.hidden_size


def adapter_bytes(model: Recommender) -> int:
    """Both layers of the adapter for all items, before and after the activation. They exist while the adapter runs."""
    return 8 * model.rows * (model.adapter_size + model.hidden_size)


def loss_bytes(model: Recommender, positions: int) -> int:
    """The items that a chunk of positions is scored against with their gradients, the gradient of all items, and the
    widened hidden states with theirs."""
    chunk = min(positions, model.chunk_positions)
    own = 4 * chunk * model.cluster_size * model.hidden_size
    return 2 * own + projected_bytes(model) + 8 * positions * model.hidden_size


def evaluation_bytes(model: Recommender, positions: int) -> int:
    """The scores of all items for a chunk of positions, before and after each of two softmaxes."""
    chunk = min(positions, model.scored_positions)
    return projected_bytes(model) + 3 * 4 * chunk * model.rows
