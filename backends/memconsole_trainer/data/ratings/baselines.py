"""Rankings without a model: by popularity, and by items that the same users rated (item-kNN)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.tasks.recommendation import GAINS, RANKED
from memconsole_trainer.data.ratings.histories import Histories
from memconsole_trainer.data.spread import even_rows

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]
RECENT = 10
"""Items of a history that item-kNN compares with. The last one counts once, the one before it half, and so on."""
MOST_TARGETS = 10_000
"""Most held-out items that item-kNN ranks. They are taken at even distances from all."""
MOST_USERS = 2_000
"""Most users of an item that its similarities are counted from. They are taken at even distances from all."""
KEPT_BYTES = 128 << 20
"""Most bytes of similarities that are kept. If those of all items are more, each item keeps its highest ones."""


class Baselines:
    """Popularity and item-kNN, both counted on the interactions of training."""

    def __init__(self, histories: Histories, items: int, places: Int64) -> None:
        """`items` counts the rows of the model's table, and `places` are those that stand for an item of the data."""
        self._histories, self._places = histories, places
        users, found = histories.train_items()
        self._counts = np.bincount(found, minlength=items).astype(np.int64)
        users *= items
        users += found
        pairs = _unique(users)
        owner, own = np.divmod(pairs, items)
        self._own = own.astype(np.int32)
        self._own_from = np.searchsorted(owner, np.arange(len(histories) + 1))
        by_item = np.sort(own * len(histories) + owner)
        self._users = (by_item % len(histories)).astype(np.int32)
        self._people = np.bincount(self._own, minlength=items)
        self._users_from = np.append(0, np.cumsum(self._people))

    def measured(self, rows: Int64, tick: Callable[[], None]) -> dict[str, float]:
        """The measures of both rankings, and the loss of popularity, on the held-out items of `rows` (n, 3): begin,
        first held-out item, end. Item-kNN ranks `MOST_TARGETS` of them. `tick` is called now and then and may raise."""
        at = _ranges(rows[:, 1], rows[:, 2])
        targets = self._histories.items[at]
        counts = self._counts[self._places]
        shares = (self._counts + 1) / (counts + 1).sum()
        ordered = np.sort(counts)
        own = self._counts[targets]
        worst = len(ordered) - np.searchsorted(ordered, own)
        above = len(ordered) - np.searchsorted(ordered, own, "right")
        nats = -np.log(shares[targets])
        found = {"popularity_loss": float(nats.mean()) if len(nats) else 0.0}
        for name, measures in (
            ("popularity", ranked(worst, worst - above)),
            ("knn", ranked(*self._near(at[even_rows(len(at), MOST_TARGETS)], tick))),
        ):
            found |= {f"{name}_{key}": value for key, value in measures.items()}
        return found

    def _near(self, at: Int64, tick: Callable[[], None]) -> tuple[Int64, Int64]:
        """The worst rank of each of the held-out items at `at` by item-kNN, and how many items have its score."""
        flat, starts = self._histories.items, self._histories.starts
        begin = starts[np.searchsorted(starts, at, "right") - 1]
        recent = [flat[max(b, a - RECENT) : a][::-1] for b, a in zip(begin, at, strict=True)]
        seen = set(np.concatenate([flat[:0], *recent]).tolist())
        similar = {}
        for item in seen:
            similar[item] = self._similarities(item, KEPT_BYTES // (8 * len(seen)))
            tick()
        tie = self._counts / (1 + self._counts.max()) * 1e-6
        worst, tied = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
        for n, (target, items) in enumerate(zip(flat[at], recent, strict=True)):
            scores = tie.copy()
            for age, item in enumerate(items, start=1):
                others, cosines = similar[item]
                scores[others] += cosines / age
            of_all = scores[self._places]
            worst[n] = (of_all >= scores[target]).sum()
            tied[n] = (of_all == scores[target]).sum()
            if n % 100 == 0:
                tick()
        return worst, tied

    def _similarities(self, item: int, most: int) -> tuple[Int64, Floats]:
        """The `most` items that are most similar to `item`, and their cosines: of the sets of users (Sarwar et al.
        2001, section 3.1.1)."""
        users = self._users[self._users_from[item] : self._users_from[item + 1]]
        some = users[even_rows(len(users), MOST_USERS)]
        own = self._own[_ranges(self._own_from[some], self._own_from[some + 1])]
        both = np.bincount(own, minlength=len(self._people)) * (len(users) / max(1, len(some)))
        both[item] = 0
        scale = np.sqrt(self._people * max(1, len(users)))
        cosines = (both / np.maximum(scale, 1)).astype(np.float32)
        others = np.flatnonzero(cosines)
        if len(others) > most:
            others = others[np.argpartition(-cosines[others], most)[:most]]
        return others.astype(np.int32), cosines[others]


def ranked(worst: Int64, tied: Int64 | int = 1) -> dict[str, float]:
    """The mean of each measure of the task, of ranks from 1. `worst` is the rank after all `tied` items with the same
    score, which share their ranks evenly."""
    ranks = np.arange(1, len(GAINS) + 1)
    worst, tied = np.broadcast_arrays(worst, tied)
    worst, tied = worst[:, None], tied[:, None]
    shares = ((ranks > worst - tied) & (ranks <= worst)) / tied  # (n, ranks)
    values = shares.sum(0) @ np.array(GAINS) / max(1, len(worst))
    return dict(zip(RANKED, values.tolist(), strict=True))


def _ranges(begins: Int64, ends: Int64) -> Int64:
    """The numbers from each beginning to each end, one after another."""
    lengths = ends - begins
    ahead = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(begins - ahead, lengths)


def _unique(numbers: Int64) -> Int64:
    """The numbers, sorted, each once. Sorts `numbers`, too."""
    numbers.sort()
    return numbers[np.diff(numbers, prepend=-1) > 0]
