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


class Numbering(msgspec.Struct, frozen=True, omit_defaults=True):
    """The number of each of the model's items in the data, from item 1; -1 where there is none."""

    numbers: list[int]
    names: list[str] = []
    """The id of each item in the data; empty where there is none. No names if all ids are whole numbers, which are
    then the `numbers`."""

    @property
    def named(self) -> Int64:
        """The model's items that stand for an item of the data, sorted. A model may have room for more."""
        return np.flatnonzero(np.array(self.numbers) >= 0) + 1

    @property
    def fingerprint(self) -> str:
        """A hash that a checkpoint keeps."""
        names = "\n".join(self.names).encode()
        return hashlib.sha256(np.array(self.numbers).tobytes() + names).hexdigest()

    def ids(self) -> list[str | None]:
        """The id in the data of each of the model's items, from item 1; None where there is none."""
        ids = self.names or map(str, self.numbers)
        pairs = zip(ids, self.numbers, strict=True)
        return [id_ if number >= 0 else None for id_, number in pairs]

    def unknown(self, ratings: Ratings) -> list[str]:
        """The ids of the ratings' items that are no items of the model."""
        own = set(self.ids())
        return [id_ for id_ in ratings.ids(np.unique(ratings.items)) if id_ not in own]

    def items_of(self, ratings: Ratings) -> NDArray[np.int32]:
        """The item of each rating; 0 for those that are no items of the model."""
        own = {id_: item for item, id_ in enumerate(self.ids(), start=1) if id_ is not None}
        found, place = np.unique(ratings.items, return_inverse=True)
        return np.array([own.get(id_, 0) for id_ in ratings.ids(found)], np.int32)[place]


def places(model: Recommender) -> Int64:
    """The items that the model has, sorted: some last places of clusters hold none."""
    number = np.arange(model.rows - 1)
    members = np.array([model.members(c) for c in range(model.clusters)])
    cluster, member = number // model.cluster_size, number % model.cluster_size
    return np.flatnonzero(member < members[cluster]) + 1


def fitted(model: Recommender, named: Int64) -> Recommender:
    """The model, in which all items but the `named` ones are absent."""
    absent = np.setdiff1d(places(model), named)
    return msgspec.structs.replace(model, absent=tuple(absent.tolist()))


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
    found, missing = np.unique(ratings.items), set(begun.unknown(ratings))
    new = [pair for pair in zip(found, ratings.ids(found), strict=True) if pair[1] in missing]
    free = exist[numbers[exist] < 0]
    if len(new) > len(free):
        needed = model.items - len(free) + len(new)
        raise PlanError(
            f"{path}: holds {len(new):,} items that the run of model.weights does not have, and its table has "
            f"{len(free):,} free places; train new weights with model.items = {needed}",
            "model.weights",
        )
    names = [id_ or "" for id_ in begun.ids()]
    for place, (number, id_) in zip(free, new, strict=False):
        numbers[place], names[place] = number, id_
    are_text = begun.names or ratings.item_names is not None
    return Numbering(numbers.tolist(), names if are_text else [])


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
        rows = features(metadata, ratings.ids(own))
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
    if ratings.item_names is None:
        return Numbering(numbers.tolist())
    names = ["" if own < 0 else ratings.item_names[own] for own in numbers.tolist()]
    return Numbering(numbers.tolist(), names)
