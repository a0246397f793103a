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


def adapter_forward_bytes(model: Recommender) -> int:
    """The most bytes while torch runs the adapter for all items: one layer, before and after its activation."""
    return 8 * model.rows * max(model.adapter_size, model.hidden_size)


def adapter_backward_bytes(model: Recommender) -> int:
    """The most bytes of the adapter's backward pass in torch for all items: the first layer before and after its activation, and
    the gradient of the second one before it; with that, the second layer and its gradient, or the first one's gradient."""
    inner, hidden = model.adapter_size, model.hidden_size
    return 4 * model.rows * (2 * inner + hidden + max(2 * hidden, inner))


def adapter_gradient_bytes(model: Recommender) -> int:
    """Bytes of the gradients of both matrices of the adapter, in fp32."""
    return 4 * model.adapter_size * (model.embedding_size + model.hidden_size)


def chosen_bytes(model: Recommender, positions: int) -> int:
    """Bytes of the items that a chunk of positions is scored against: those of its targets' clusters, in fp32."""
    return 4 * positions * model.cluster_size * model.hidden_size


def loss_bytes(model: Recommender, positions: int) -> int:
    """Bytes of the loss: the items that a chunk of positions is scored against and their gradients, the gradient of all
    items, and the fp32 hidden states and their gradients."""
    chunk = min(positions, model.chunk_positions)
    return (
        2 * chosen_bytes(model, chunk) + projected_bytes(model) + 8 * positions * model.hidden_size
    )


def evaluation_bytes(model: Recommender, positions: int) -> int:
    """Bytes of the scores of all items for a chunk of positions, before and after each of two softmaxes."""
    chunk = min(positions, model.scored_positions)
    return projected_bytes(model) + 3 * 4 * chunk * model.rows
