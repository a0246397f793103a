"""The items of a run: maps the item numbers of the data to the items of the model, which are ordered by cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import PlanError
from memconsole_trainer.data.ratings import clusters
from memconsole_trainer.data.ratings.histories import Histories
from memconsole_trainer.data.ratings.metadata import Metadata, features
from memconsole_trainer.data.ratings.reading import Ratings

Int64 = NDArray[np.int64]
SEED = 0
"""The seed of clustering. It does not depend on the run, so that runs with other seeds have the same clusters."""


class Numbering(msgspec.Struct, frozen=True):
    """The number of each of the model's items in the data, from item 1; -1 where there is none."""

    numbers: list[int]

    @property
    def named(self) -> Int64:
        """The model's items that stand for an item of the data, sorted. A model may have room for more."""
        return np.flatnonzero(np.array(self.numbers) >= 0) + 1

    @property
    def fingerprint(self) -> str:
        """A hash that a checkpoint keeps."""
        return hashlib.sha256(np.array(self.numbers).tobytes()).hexdigest()

    def ids(self) -> list[str | None]:
        """The id in the data of each of the model's items, from item 1; None where there is none."""
        return [str(number) if number >= 0 else None for number in self.numbers]

    def knows(self, numbers: Int64) -> NDArray[np.bool_]:
        """Which of `numbers` of the data are items of the model."""
        return np.isin(numbers, self.numbers)

    def unknown(self, numbers: Int64) -> int | None:
        """The first of `numbers` that no item has; None if there is none."""
        missing = np.setdiff1d(numbers, self.numbers)
        return int(missing[0]) if len(missing) else None

    def items_of(self, numbers: Int64) -> NDArray[np.int32]:
        """The items of `numbers` of the data."""
        own = np.array(self.numbers)
        order = np.argsort(own, kind="stable")
        return (order[np.searchsorted(own, numbers, sorter=order)] + 1).astype(np.int32)


def places(model: Recommender) -> Int64:
    """The items that the model has, sorted: some last places of clusters hold none."""
    number = np.arange(model.rows - 1)
    members = np.array([model.members(c) for c in range(model.clusters)])
    cluster, member = number // model.cluster_size, number % model.cluster_size
    return np.flatnonzero(member < members[cluster]) + 1


def check_room(path: Path, ratings: Ratings, model: Recommender) -> None:
    """Raise `PlanError` if the data holds more items than the model."""
    found = len(np.unique(ratings.items))
    if found > model.items:
        raise PlanError(
            f"{path}: holds {found:,} items, the model {model.items:,}; set model.items = {found}",
            "model.items",
        )


def extended(begun: Numbering, path: Path, ratings: Ratings, model: Recommender) -> Numbering:
    """The numbering of the run whose weights are taken, with new items in free places. Raises `PlanError` if the
    model has other places, or too few free ones."""
    numbers, exist = np.array(begun.numbers), places(model) - 1
    if len(numbers) != model.rows - 1 or (np.delete(numbers, exist) >= 0).any():
        raise PlanError(
            f"model.items = {model.items:,} in {model.clusters:,} clusters: the run of model.weights has its "
            "items in other places; expected its model.items and model.clusters",
            "model.items",
        )
    new, free = np.setdiff1d(ratings.items, numbers), exist[numbers[exist] < 0]
    if len(new) > len(free):
        found = model.items - len(free) + len(new)
        raise PlanError(
            f"{path}: holds {len(new):,} items that the run of model.weights does not have, and its table has "
            f"{len(free):,} free places; train new weights with model.items = {found}",
            "model.weights",
        )
    numbers[free[: len(new)]] = new
    return Numbering(numbers.tolist())


def number(
    ratings: Ratings,
    metadata: Metadata | None,
    model: Recommender,
    fraction: float,
    tick: Callable[[], None],
) -> Numbering:
    """Cluster the items, and number them by cluster. Items without ratings get the remaining places."""
    own, dense = np.unique(ratings.items, return_inverse=True)
    if metadata is not None:
        rows = features(metadata, own.tolist())
    else:
        histories = Histories(ratings.users, dense.astype(np.int32), fraction)
        owner, items = histories.train_items()
        rows = clusters.from_histories(items.astype(np.int64), owner, len(own), SEED)
    members = np.array([model.members(c) for c in range(model.clusters)])
    cluster = clusters.balanced(rows, members, SEED, tick)
    numbers = np.full(model.rows - 1, -1)
    for c in range(model.clusters):
        found = own[cluster == c]
        numbers[c * model.cluster_size : c * model.cluster_size + len(found)] = found
    return Numbering(numbers.tolist())
