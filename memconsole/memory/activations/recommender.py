"""The tensors of a recommender's step outside its decoder's blocks: projected items, and chunks of scores."""

from __future__ import annotations

from memconsole.plan.models.recommender import Recommender


def projected_bytes(model: Recommender) -> int:
    """Bytes of all items and clusters after the adapter, in fp32. They are the inputs, and outputs are scored against
    them."""
    return 4 * (model.rows + model.clusters) * model.hidden_size


def adapter_bytes(model: Recommender) -> int:
    """Bytes of both layers of the adapter for all items, before and after the activation, while the adapter runs."""
    return 8 * model.rows * (model.adapter_size + model.hidden_size)


def loss_bytes(model: Recommender, positions: int) -> int:
    """Bytes of the loss: the items that a chunk of positions is scored against and their gradients, the gradient of all
    items, and the fp32 hidden states and their gradients."""
    chunk = min(positions, model.chunk_positions)
    own = 4 * chunk * model.cluster_size * model.hidden_size
    return 2 * own + projected_bytes(model) + 8 * positions * model.hidden_size


def evaluation_bytes(model: Recommender, positions: int) -> int:
    """Bytes of the scores of all items for a chunk of positions, before and after each of two softmaxes."""
    chunk = min(positions, model.scored_positions)
    return projected_bytes(model) + 3 * 4 * chunk * model.rows
