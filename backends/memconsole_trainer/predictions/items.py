"""Recommends items to the users of a file of ratings."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from memconsole.plan.catalog.ratings import ratings_in
from memconsole.plan.models.recommender import ITEMS_JSON, Recommender
from memconsole.plan.plan import DataChoice
from memconsole.plan.tasks.recommendation import PADDING
from memconsole_trainer.data.ratings.histories import Histories, batch_of
from memconsole_trainer.data.ratings.numbering import Numbering, fitted
from memconsole_trainer.data.ratings.reading import read_ratings
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.tasks.recommendation import read_numbering
from memconsole_trainer.weights.trained import TrainedModel

COLUMNS = ("user", "rank", "item", "score")
NAMED = 5
"""Most unknown items that the warning names."""


def write(
    trained_model: TrainedModel,
    source: Path,
    data: DataChoice,
    out: Path,
    top: int,
    seen: bool,
    warn: Callable[[str], None],
) -> str:
    """Write the `top` items that follow each user's last items to `out`, a CSV file with `COLUMNS`. `data` names
    the columns of `source`. A score is log P(item). Items that the user already has are left out unless `seen`. Returns what was written, in
    words. Raises `DataError`, `PlanError`, `WeightsError` and OSError.

    Users are scored in batches; of a batch the scores of all items after each user's last item are in memory.
    """
    model, length = trained_model.model, trained_model.plan.data.sequence_length
    assert isinstance(model, Recommender)
    numbering = numbering_of(trained_model)
    source = ratings_in(source, data) or source
    ratings = read_ratings(source, data, lambda: None)
    items = numbering.items_of(ratings)
    known = items > 0
    if not known.any():
        raise DataError(f"{source}: holds no item that the run knows")
    users = ratings.users[known]
    histories = Histories(users, items[known], 0.0)
    if not known.all():
        others = len(np.unique(ratings.users)) - len(histories)
        warn(_unknown(source, numbering.unknown(ratings), others))
    engine = dataclasses.replace(trained_model, model=fitted(model, numbering.named)).engine()
    ids = numbering.ids()
    named = np.array([name is not None for name in ids])
    rows = min(trained_model.plan.evaluation_batch, model.scored_positions)
    shape = BatchShape(1, rows, length)
    with open(out, "x", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        written = 0
        for begin in range(0, len(histories), rows):
            numbers = range(begin, min(begin + rows, len(histories)))
            own = [histories.items[histories.starts[n] : histories.ends[n]] for n in numbers]
            # The item after the last one is not known, so it is padding.
            contexts = [(np.append(one[-length:], np.int32(PADDING)), 1) for one in own]
            scores = engine.outputs(batch_of(contexts, shape))
            for n, history, of_items in zip(numbers, own, scores, strict=False):
                allowed = named.copy()
                if not seen:
                    allowed[history - 1] = False
                of_items = np.where(allowed, of_items, -np.inf)
                best = np.argsort(-of_items, kind="stable")[: min(top, int(allowed.sum()))]
                written += len(best)
                user = ratings.user_id(int(users[histories.starts[n]]))
                table.writerows(
                    (user, rank, ids[item], f"{of_items[item]:.6f}")
                    for rank, item in enumerate(best.tolist(), start=1)
                )
    users_in_words = f"{len(histories):,} user{'s' if len(histories) != 1 else ''}"
    if written < top * len(histories):
        return f"{written:,} items for {users_in_words}, at most {top:,} for each"
    return f"{top} items for each of {users_in_words}"


def numbering_of(trained_model: TrainedModel) -> Numbering:
    """The items of a trained model. Raises `DataError` if the run lost them or has others now."""
    path = trained_model.directory / ITEMS_JSON
    try:
        numbering = read_numbering(trained_model.directory)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if numbering.fingerprint != trained_model.checkpoint.fingerprints.get("clustering"):
        raise DataError(f"{path}: does not hold the items that the run was trained with")
    return numbering


def _unknown(source: Path, items: list[str], users: int) -> str:
    """The warning about items that the run does not know, and about users who have no others."""
    shown = ", ".join(items[:NAMED]) + (", …" if len(items) > NAMED else "")
    said = f"{source}: left out items that the run does not know ({len(items):,}): {shown}"
    return said + (f"; left out users without other items: {users:,}" if users else "")
