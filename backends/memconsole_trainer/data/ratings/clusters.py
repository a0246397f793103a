"""Clusters of equally many items, by k-means on features of the items."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memconsole_trainer.data.ratings.metadata import unit
from memconsole_trainer.randomness import generator

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]
ROUNDS = 12
FEATURES = 64
"""Width of features that are made from histories."""
NEAR = 3
"""Items of a history at most this far apart are neighbours."""


def from_histories(items: Int64, users: Int64, count: int, seed: int) -> Floats:
    """Features (count, FEATURES) of items 0 … count - 1 from the items near them in histories: each item has a random
    vector, and an item's features are the sum of its neighbours' vectors, made twice. Items are
    alike if they have neighbours in common. `items` are sorted by user and time."""
    found: Floats = generator(seed, "neighbours").standard_normal((count, FEATURES), np.float32)
    for _ in range(2):
        total = found * 0.1
        for distance in range(1, NEAR + 1):
            same = users[distance:] == users[:-distance]
            before, after = items[:-distance][same], items[distance:][same]
            for one, other in ((before, after), (after, before)):
                for start in range(0, len(one), 1 << 16):
                    part = slice(start, start + (1 << 16))
                    np.add.at(total, one[part], found[other[part]])
        found = unit(total)
        found = unit(found - found.mean(0))
    return found


def balanced(
    features: Floats, places: NDArray[np.int64], seed: int, tick: Callable[[], None]
) -> Int64:
    """The cluster of each row of `features`. Cluster c takes at most `places[c]` rows.

    Lloyd's k-means from centres chosen as k-means++ does (Arthur and Vassilvitskii 2007). Rows near
    their centre choose first; a row whose nearest cluster is full takes the nearest one with room.
    """
    centres = _first_centres(features, len(places), generator(seed, "centres"))
    cluster = np.zeros(len(features), np.int64)
    for _ in range(ROUNDS):
        before, cluster = cluster, _assigned(features, centres, places)
        tick()
        if (before == cluster).all():
            break
        centres = _means(features, cluster, centres)
    return cluster


def _first_centres(features: Floats, count: int, draw: np.random.Generator) -> Floats:
    chosen = [int(draw.integers(len(features)))]
    nearest = _distances(features, features[chosen])[:, 0].astype(np.float64)
    for _ in range(count - 1):
        total = nearest.sum()
        if total <= 0:
            chosen.append(int(draw.integers(len(features))))
            continue
        chosen.append(int(draw.choice(len(features), p=nearest / total)))
        nearest = np.minimum(nearest, _distances(features, features[chosen[-1:]])[:, 0])
    return features[chosen].copy()


def _assigned(features: Floats, centres: Floats, places: NDArray[np.int64]) -> Int64:
    room = places.copy()
    found = np.empty(len(features), np.int64)
    distances = _distances(features, centres)
    for row in np.argsort(distances.min(1), kind="stable"):
        free = np.where(room > 0, distances[row], np.inf)
        found[row] = free.argmin()
        room[found[row]] -= 1
    return found


def _distances(features: Floats, centres: Floats) -> Floats:
    """Squared distances (rows, centres)."""
    own, other = np.square(features).sum(1)[:, None], np.square(centres).sum(1)
    found: Floats = np.maximum(own + other - 2 * (features @ centres.T), 0)
    return found


def _means(features: Floats, cluster: Int64, centres: Floats) -> Floats:
    counts = np.bincount(cluster, minlength=len(centres))
    sums = np.zeros_like(centres)
    np.add.at(sums, cluster, features)
    return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
