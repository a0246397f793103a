"""Data of recommendation: rows of items, and the rankings of two simple baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from memconsole import regular_file, typed_json
from memconsole.plan import catalog
from memconsole.plan.data.rows import keep_counted_rows
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import ITEMS_JSON, Recommender
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.plan.training.origin import checkpoint_of
from memconsole.runs.record import files
from memconsole.runs.record.log import events
from memconsole_trainer.data.ratings.baselines import MOST_TARGETS, Baselines
from memconsole_trainer.data.ratings.histories import Histories, HistoryRows, batch_of
from memconsole_trainer.data.ratings.metadata import find_metadata
from memconsole_trainer.data.ratings.numbering import (
    Numbering,
    check_room,
    extended,
    fitted,
    number,
)
from memconsole_trainer.data.ratings.reading import first_users, read_ratings
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.hashes import DataHashes
from memconsole_trainer.data.spread import evaluated, evaluated_rows
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.engine import Batch, Engine, LossSum
from memconsole_trainer.tasks.task import Judged, Start, Teller

MOST_BYTES = 1 << 30


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> RatingData:
    """Read the ratings of a run, cluster its items and split its histories. Raises `PlanError` and
    `DataError`."""
    assert isinstance(model, Recommender)
    say.phase("data", plan.data.source)
    path = Path(catalog.dataset(plan).where).expanduser()
    ratings = first_users(read_ratings(path, plan.data, say.tick), plan.data.max_examples)
    metadata = find_metadata(path, plan.data, say.warning)
    # The rows that are left out count: a run that was begun with them has others.
    rows = f"-{ratings.repeated}" if ratings.repeated else ""
    data = ratings.fingerprint + rows + (metadata.fingerprint if metadata else "")
    say.phase("data", "clustering")
    try:
        numbering = read_numbering(directory)
    except (OSError, msgspec.DecodeError):
        checkpoint = checkpoint_of(plan)
        if checkpoint is None:
            check_room(path, ratings, model)
            numbering = number(ratings, metadata, model, plan.data.validation_fraction, say.tick)
        else:
            numbering = extended(_of_run(checkpoint), path, ratings, model)
        files.write_atomic(directory / ITEMS_JSON, msgspec.json.encode(numbering))
    unknown = numbering.unknown(ratings)
    if unknown:
        raise DataError(
            f"{path}: item {unknown[0]} was not there when this run began; start a new run"
        )
    items = numbering.items_of(ratings)
    histories = Histories(ratings.users, items, plan.data.validation_fraction)
    found = RatingData(plan, model, histories, numbering, data)
    if not len(found.rows().bounds):
        raise DataError(f"{path}: no user has two interactions to train on")
    keep_counted_rows(plan, len(found.rows().bounds))
    if plan.data.validation_fraction and not found.validation_rows:
        say.warning("nothing is held out for validation: no user has three interactions")
    if ratings.warning:
        say.warning(f"{path}: {ratings.warning}")
    if not ratings.timed:
        say.warning("no column of times: the order of the file is taken for the order of time")
    return found


def read_numbering(directory: Path) -> Numbering:
    """The items of the run in `directory`. Raises OSError and `msgspec.DecodeError`."""
    return typed_json.decode(regular_file.read(directory / ITEMS_JSON, MOST_BYTES), Numbering)


def _of_run(checkpoint: Path) -> Numbering:
    """The items of the run that wrote a checkpoint. Raises `DataError`."""
    directory = checkpoint.resolve().parents[1]  # "best" is a link to the checkpoint of a step
    try:
        return read_numbering(directory)
    except (OSError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(
            f"model.weights = {checkpoint}: the items of its table cannot be read from {directory / ITEMS_JSON}: {why}"
        ) from None


class RatingData:
    """Implements `TaskData`."""

    def __init__(
        self,
        plan: Plan,
        model: Recommender,
        histories: Histories,
        numbering: Numbering,
        fingerprint: str,
    ) -> None:
        self._plan, self._model, self._histories = plan, model, histories
        self._held = histories.held_rows(plan.data.sequence_length)
        self._baselines: dict[str, float] | None = None
        self._named = numbering.named
        self.description = (
            f"{plan.data.source}: {len(histories.items):,} interactions of {len(histories):,} users with "
            f"{len(self._named):,} items, {histories.held_out:,} held out"
        )
        if histories.held_out > MOST_TARGETS:
            self.description += f", item-kNN measured on at most {MOST_TARGETS:,} of these"
        self.fingerprints: Mapping[str, str] = {
            "data": fingerprint,
            "clustering": numbering.fingerprint,
        }
        self.hashes = DataHashes((), {})  # the fingerprint is that of all bytes
        self.validation_rows = len(self._held)
        self.answered_records = 0

    def fitted(self, model: Model) -> Model:
        return fitted(self._model, self._named)

    def measure_start(self, start: Start, say: Teller) -> None:
        """Nothing needs to be known."""

    def rows(self, shuffle_buffer: int | None = None) -> HistoryRows:
        """The training rows. They are in memory, so that no window is needed."""
        return HistoryRows(self._plan, self._histories)

    def steps_per_epoch(self, shape: BatchShape) -> int:
        return max(1, -(-len(self.rows().bounds) // shape.rows))

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        rows, items = shape.micro_batch, self._histories.items
        one = BatchShape(1, rows, shape.sequence_length)
        for numbers in evaluated_rows(self.validation_rows, rows, limit):
            part = self._held[numbers]
            yield batch_of([(items[b:e], f - b) for b, f, e in part], one)

    def judged(
        self,
        total: LossSum,
        shape: BatchShape,
        limit: int,
        engine: Engine,
        tick: Callable[[], None],
    ) -> Judged:
        """The task's measures, and those of popularity and item-kNN on the same held-out items; of many, item-kNN
        ranks some."""
        if self._baselines is None:
            held = self._held[evaluated(self.validation_rows, shape.micro_batch, limit)]
            made = Baselines(self._histories, self._model.rows, self._named)
            self._baselines = made.measured(held, tick)
        own = zip(task_of(self._plan).measures, total.measures, strict=True)
        return Judged(self._baselines | {m.key: v / max(total.weight, 1e-9) for m, v in own})

    def answered(self, engine: Engine, tick: Callable[[], None]) -> dict[str, float]:
        return {}

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        full = np.resize(self._named, shape.rows * (shape.sequence_length + 1))
        rows = full.astype(np.int32).reshape(shape.rows, -1)
        return batch_of([(row, 1) for row in rows], shape)

    def room_for_sample(self) -> bool:
        return False

    def sample(self, engine: Engine, step: int) -> events.Sample | None:
        return None
