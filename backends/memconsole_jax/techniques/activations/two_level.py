"""The two-level softmax of a recommender: over the clusters, and over the items of one cluster.

All functions take hidden states (..., H), the members of each cluster (C, M, H), the clusters (C,
H), all float32, and target items (...), of which 0 does not count. Positions are processed in
chunks, so that the logits of all positions never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memconsole.plan.models.recommender import Recommender
from memconsole.plan.tasks.recommendation import ABSENT, GAINS, PADDING, RANKED
from memconsole_jax.layout.mesh import shard_map_rows
from memconsole_jax.models.recommender import Projected


def nats(model: Recommender, projected: Projected, targets: Array) -> Array:
    """Summed -log P(cluster) - log P(item | cluster) of the targets. The backward pass computes the
    logits again, one chunk at a time."""

    def one(projected: Projected, labels: Array) -> Array:
        counts, place = labels != PADDING, jnp.maximum(labels - 1, 0)
        cluster, member = place // model.cluster_size, place % model.cluster_size  # (n,)
        of_cluster = projected.hidden @ projected.clusters.T  # (n, C)
        of_item = jnp.einsum("nh,nmh->nm", projected.hidden, projected.members[cluster])  # (n, M)
        of_item = jnp.where(_present(model)[cluster], of_item, ABSENT)
        return jnp.sum(counts * (_lost(of_cluster, cluster) + _lost(of_item, member)))

    return _summed(one, jnp.float32(0.0), projected, targets, model.chunk_positions)


def scores(model: Recommender, projected: Projected) -> Array:
    """log P(item) of every item, at every position (..., C · M); item i is column i - 1. Columns without an item
    are about `ABSENT`."""
    of_cluster = jax.nn.log_softmax(projected.hidden @ projected.clusters.T, axis=-1)  # (..., C)
    of_item = jnp.einsum("...h,cmh->...cm", projected.hidden, projected.members)
    of_item = jax.nn.log_softmax(jnp.where(_present(model), of_item, ABSENT), axis=-1)
    return (of_item + of_cluster[..., None]).reshape(*of_cluster.shape[:-1], -1)


def ranked(model: Recommender, projected: Projected, targets: Array) -> Array:
    """Sums over the targets: nats, then recall, MRR and NDCG at each of `CUTOFFS`, among all items. Items
    with the target's score share their ranks with it. Only positions with a target are scored."""
    gains, ranks = jnp.array(GAINS), jnp.arange(1, len(GAINS) + 1)

    def one(projected: Projected, labels: Array) -> Array:
        counts = (labels != PADDING)[:, None]
        of_all = scores(model, projected)  # (n, C · M)
        own = jnp.take_along_axis(of_all, jnp.maximum(labels - 1, 0)[:, None], axis=1)  # (n, 1)
        # A score that is not a number has no rank.
        # One pass counts both, so that the scores are not stored once more.
        above, worst = (
            count[:, None]
            for count in lax.reduce(
                ((of_all > own).astype(jnp.int32), (of_all >= own).astype(jnp.int32)),
                (jnp.int32(0), jnp.int32(0)),
                lambda sums, more: (sums[0] + more[0], sums[1] + more[1]),
                (1,),
            )
        )
        shares = (counts & (ranks > above) & (ranks <= worst)) / jnp.maximum(worst - above, 1)
        measures = jnp.sum(jnp.sum(shares, axis=0)[:, None] * gains, axis=0)
        return jnp.append(-jnp.sum(jnp.where(counts, own, 0)), measures)

    def of_rows(
        hidden: Array, targets: Array, members: Array, clusters: Array
    ) -> tuple[Array, tuple[()]]:
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        size = min(model.scored_positions, len(labels))
        order = jnp.argsort(labels == PADDING)  # positions with a target come first
        order = jnp.pad(order, (0, -len(labels) % size), constant_values=len(labels))
        chunks = -(-jnp.sum(labels != PADDING) // size)

        def step(n: Array, total: Array) -> Array:
            at = lax.dynamic_slice_in_dim(order, n * size, size)
            own = labels.at[at].get(mode="fill", fill_value=PADDING)
            return total + one(Projected(rows[at], members, clusters), own)

        return lax.fori_loop(0, chunks, step, jnp.zeros(1 + len(RANKED))), ()

    return _sum_over_rows(of_rows, projected, targets)


def _lost(logits: Array, targets: Array) -> Array:
    """Nats of targets (n,) given logits (n, classes)."""
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def _present(model: Recommender) -> Array:
    """Which places of each cluster hold an item of the data (C, M)."""
    members = np.array([model.members(cluster) for cluster in range(model.clusters)])
    present = np.arange(model.cluster_size) < members[:, None]
    present.flat[np.array(model.absent, int) - 1] = False
    return jnp.asarray(present)


def _sum_over_rows(function: Callable[..., Any], projected: Projected, targets: Array) -> Array:
    """The sums of `function`. Each of several devices goes through the positions of its own rows."""
    sharded, replicated = (projected.hidden, targets), (projected.members, projected.clusters)
    total: Array = shard_map_rows(function, sharded, replicated)[0]
    return total


def _summed(
    one: Callable[[Projected, Array], Array],
    start: Array,
    projected: Projected,
    targets: Array,
    size: int,
) -> Array:
    """The sum of `one` over chunks of at most `size` positions; the last chunk is padded."""

    def of_rows(
        hidden: Array, targets: Array, members: Array, clusters: Array
    ) -> tuple[Array, tuple[()]]:
        def of_chunk(rows: Array, labels: Array) -> Array:
            return one(Projected(rows, members, clusters), labels)

        rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        chunks = -(-len(rows) // size)
        each = -(-len(rows) // chunks)
        missing = chunks * each - len(rows)
        rows = jnp.pad(rows, ((0, missing), (0, 0))).reshape(chunks, each, -1)
        labels = jnp.pad(labels, (0, missing), constant_values=PADDING).reshape(chunks, each)
        if chunks == 1:
            return start + of_chunk(rows[0], labels[0]), ()

        def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            return total + jax.checkpoint(of_chunk)(*part), None

        return lax.scan(step, start, (rows, labels))[0], ()

    return _sum_over_rows(of_rows, projected, targets)
