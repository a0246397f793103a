"""The two-level softmax of a recommender: over the clusters, and over the items of one cluster.

All functions take hidden states (..., H), the members of each cluster (C, M, H), the clusters (C,
H), all fp32, and target items (...), of which 0 does not count. Positions are processed in chunks,
so that the logits of all positions never exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memconsole.plan.models.recommender import Recommender
from memconsole.plan.tasks.recommendation import ABSENT, GAINS, PADDING, RANKED
from memconsole_torch.models.linear import linear
from memconsole_torch.models.recommender import Projected


def nats(model: Recommender, projected: Projected, targets: Tensor) -> Tensor:
    """Summed -log P(cluster) - log P(item | cluster) of the targets. The backward pass computes the
    logits again, one chunk at a time."""
    size = model.chunk_positions
    total = torch.zeros((), device=targets.device)
    for hidden, labels in _chunks(projected.hidden, targets, size):
        arguments = model, hidden, projected.members, projected.clusters, labels
        if torch.is_grad_enabled():
            total = total + checkpoint(
                _nats, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            total = total + _nats(*arguments)
    return total


def _nats(
    model: Recommender, hidden: Tensor, members: Tensor, clusters: Tensor, targets: Tensor
) -> Tensor:
    """The summed loss of `nats` for one chunk of n positions."""
    counts, place = targets != PADDING, (targets - 1).clamp(min=0).long()
    with torch.autocast(hidden.device.type, enabled=False):
        cluster, member = place // model.cluster_size, place % model.cluster_size  # (n,)
        of_cluster = linear(hidden, clusters)  # (n, C)
        own = F.embedding(cluster, members.flatten(1)).view(-1, *members.shape[1:])  # (n, M, H)
        of_item = torch.bmm(own, hidden[:, :, None])[:, :, 0]  # (n, M)
        of_item = of_item.masked_fill(~_present(model, hidden.device)[cluster], ABSENT)
        lost = F.cross_entropy(of_cluster, cluster, reduction="none")
        lost = lost + F.cross_entropy(of_item, member, reduction="none")
        return (lost * counts).sum()


@torch.no_grad()
def scores(model: Recommender, projected: Projected) -> Tensor:
    """log P(item) of every item, at every position (..., C · M), without gradients; item i is column i - 1. Columns
    without an item are about `ABSENT`."""
    with torch.autocast(projected.hidden.device.type, enabled=False):
        of_cluster = linear(projected.hidden, projected.clusters).log_softmax(-1)  # (..., C)
        of_item = linear(projected.hidden, projected.members.flatten(0, 1))  # (..., C · M)
        of_item = of_item.unflatten(-1, (model.clusters, model.cluster_size))
        of_item.masked_fill_(~_present(model, of_item.device), ABSENT)  # in place, to save memory
        return of_item.log_softmax(-1).add_(of_cluster[..., None]).flatten(-2)


@torch.no_grad()
def ranked(model: Recommender, projected: Projected, targets: Tensor, positions: Tensor) -> Tensor:
    """Sums over the targets at `positions` (n,), which are those that count: nats, then recall, MRR and NDCG at each
    of `CUTOFFS`, among all items. Items with the target's score share their ranks with it."""
    total = torch.zeros(1 + len(RANKED), device=targets.device)
    gains = torch.tensor(GAINS, device=targets.device)
    ranks = torch.arange(1, len(GAINS) + 1, device=targets.device)
    hidden, labels = projected.hidden.flatten(0, -2), targets.flatten()
    for chunk in positions.split(model.scored_positions):
        of_all = scores(model, projected._replace(hidden=hidden[chunk]))  # (n, C · M)
        own = of_all.gather(1, labels[chunk, None].long() - 1)  # (n, 1)
        # A score that is not a number has no rank.
        above, worst = (of_all > own).sum(1, keepdim=True), (of_all >= own).sum(1, keepdim=True)
        shares = ((ranks > above) & (ranks <= worst)) / (worst - above).clamp(min=1)  # (n, ranks)
        total += torch.cat([-own.sum()[None], (shares.sum(0)[:, None] * gains).sum(0)])
    return total


def _present(model: Recommender, device: torch.device) -> Tensor:
    """Which places of each cluster hold an item of the data (C, M)."""
    fewest = model.items // model.clusters
    many = torch.arange(model.clusters, device=device) < model.items % model.clusters
    present = torch.arange(model.cluster_size, device=device) < (fewest + many.long())[:, None]
    if model.absent:
        present.view(-1)[torch.tensor(model.absent, device=device) - 1] = False
    return present


def _chunks(hidden: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(hidden.flatten(0, -2).split(size), targets.flatten().split(size), strict=True)
