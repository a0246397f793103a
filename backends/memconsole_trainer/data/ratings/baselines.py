"""Rankings without a model: by popularity, and by items that the same users rated (item-kNN)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.tasks.recommendation import CUTOFFS, RANKED
from memconsole_trainer.data.ratings.histories import Histories

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]
RECENT = 10
"""Items of a history that item-kNN compares with. The last one counts once, the one before it half, and so on."""
KEPT_BYTES = 128 << 20
"""Most bytes of similarities that are kept."""


class Baselines:
    """Popularity and item-kNN, both counted on the interactions of training."""

    def __init__(self, histories: Histories, items: int, places: Int64) -> None:
        """`items` counts the rows of the model's table, and `places` are those that stand for an item of the data."""
        self._histories, self._places = histories, places
        users, found = histories.train_items()
        self._counts = np.bincount(found, minlength=items).astype(np.int64)
        pairs = np.unique(users * items + found)
        self._owner, self._own = pairs // items, (pairs % items).astype(np.int32)
        order = np.argsort(self._own, kind="stable")
        self._users = self._owner[order]
        self._users_from = np.searchsorted(self._own[order], np.arange(items + 1))
        self._own_from = np.searchsorted(self._owner, np.arange(len(histories) + 1))
        self._people = np.diff(self._users_from)
        self._similar: OrderedDict[int, Floats] = OrderedDict()

    def measured(self, rows: Iterable[Int64]) -> dict[str, float]:
        """The measures of both rankings, and the loss of popularity, on the held-out items of `rows`: begin, first
        held-out item, end."""
        shares = (self._counts + 1) / (self._counts[self._places] + 1).sum()
        popular, near = [], []
        nats = 0.0
        flat = self._histories.items
        starts = self._histories.starts
        tie = self._counts / (1 + self._counts.max()) * 1e-6
        for _, first, end in rows:
            begin = int(starts[np.searchsorted(starts, first, "right") - 1])
            for at in range(int(first), int(end)):
                target = int(flat[at])
                popular.append(self._rank(self._counts, target))
                nats -= float(np.log(shares[target]))
                recent = flat[max(begin, at - RECENT) : at][::-1]
                scores = tie.copy()
                for age, item in enumerate(recent, start=1):
                    scores += self._similarities(int(item)) / age
                near.append(self._rank(scores, target))
        found = {"popularity_loss": nats / max(1, len(popular))}
        for name, ranks in (("popularity", popular), ("knn", near)):
            values = ranked(np.array(ranks))
            found |= {f"{name}_{key}": value for key, value in values.items()}
        return found

    def _rank(self, scores: NDArray[np.generic], target: int) -> int:
        """The rank of `target`, from 1. Items with the same score as the target rank before it."""
        return int((scores[self._places] >= scores[target]).sum())

    def _similarities(self, item: int) -> Floats:
        """Cosine of the sets of users of `item` and of every item (Sarwar et al. 2001, section 3.1.1)."""
        kept = self._similar.get(item)
        if kept is not None:
            self._similar.move_to_end(item)
            return kept
        users = self._users[self._users_from[item] : self._users_from[item + 1]]
        both = np.zeros(len(self._people))
        for user in users:
            both[self._own[self._own_from[user] : self._own_from[user + 1]]] += 1
        both[item] = 0
        scale = np.sqrt(self._people * max(1, len(users)))
        found = (both / np.maximum(scale, 1)).astype(np.float32)
        self._similar[item] = found
        if len(self._similar) * found.nbytes > KEPT_BYTES:
            self._similar.popitem(last=False)
        return found


def ranked(ranks: Int64) -> dict[str, float]:
    """The mean of each measure of the task, of ranks from 1."""
    gains = {"recall": np.ones(len(ranks)), "mrr": 1 / ranks, "ndcg": 1 / np.log2(ranks + 1)}
    values = [
        float(np.where(ranks <= k, gain, 0).mean()) if len(ranks) else 0.0
        for gain in gains.values()
        for k in CUTOFFS
    ]
    return dict(zip(RANKED, values, strict=True))
