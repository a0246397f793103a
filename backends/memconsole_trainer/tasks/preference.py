"""Data of preferences: pairs of answers, and what the weights that training starts from say of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from memconsole import regular_file
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks.language import MASKED
from memconsole.plan.tasks.preference import PREFERENCES, REFERENCE_LOSS, Preference
from memconsole.runs.record.files import write_atomic
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.rows.batches import TextRows
from memconsole_trainer.data.text.rows.pairs import (
    SCORED,
    PairRows,
    Reference,
    each_once,
    keys_of,
    of_pairs,
    weighted,
)
from memconsole_trainer.engine import Batch, Engine, LossSum
from memconsole_trainer.host import heap
from memconsole_trainer.tasks.language import LanguageData, Opened, opened_text
from memconsole_trainer.tasks.task import Judged, Start, Teller

FILE = "reference.npz"
"""The file in the run's directory that holds the log-likelihoods."""
MOST_BYTES = 1 << 34
EVERY_ROW = 1 << 62
"""Rows that are scored of an epoch that has been read to its end: more than any epoch has."""
TOLD_SECONDS = 5.0
"""Seconds between two reports of how many pairs are scored."""
KEPT_SECONDS = 60.0
"""Seconds after which the answers that were scored are written, so that an attempt that ends early has to score few again."""


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> PairData:
    """Open the data of a run. Raises `PlanError` and `DataError`."""
    task = PREFERENCES[plan.train.objective]
    opened = opened_text(plan, model, directory, say, known)
    if task.has_reference:
        return ReferenceData(task, opened, directory)
    return PairData(task, opened)


class PairData(LanguageData):
    """Implements `TaskData`: pairs of answers."""

    def __init__(self, task: Preference, opened: Opened) -> None:
        super().__init__(*opened)
        self._task = task

    def as_pairs(self, batch: Batch) -> Batch:
        """A batch of language with the number of pairs as its weight."""
        return weighted(batch)

    def rows(self, shuffle_buffer: int | None = None) -> PairRows:
        pairs = super().rows(shuffle_buffer)
        assert isinstance(pairs, TextRows)
        return PairRows(pairs, self.as_pairs)

    def steps_per_epoch(self, shape: BatchShape) -> int:
        pairs = dataclasses.replace(shape, micro_batch=shape.micro_batch // 2)
        return super().steps_per_epoch(pairs)

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        return map(self.as_pairs, super().validation(shape, limit))

    def judged(
        self,
        total: LossSum,
        shape: BatchShape,
        limit: int,
        engine: Engine,
        tick: Callable[[], None],
    ) -> Judged:
        """The means of the task's measures over pairs."""
        own = zip(self._task.measures, total.measures, strict=True)
        return Judged({m.key: value / max(total.weight, 1.0) for m, value in own})

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        return dataclasses.replace(super().longest(first, shape), weight=shape.rows / 2)


class ReferenceData(PairData):
    """Pairs of answers, and the log-likelihoods of the answers under the weights that training starts from."""

    def __init__(self, task: Preference, opened: Opened, directory: Path) -> None:
        super().__init__(task, opened)
        self._file = directory / FILE
        self._reference = Reference()

    def as_pairs(self, batch: Batch) -> Batch:
        return self._reference.attached(weighted(batch))

    def measure_start(self, start: Start, say: Teller) -> None:
        """Compute the log-likelihood of every answer that is trained or evaluated under the starting weights, so that
        training needs no second model. What the run's directory holds is not computed again. What is computed is kept
        there once a minute, and when a stop is requested."""
        stored = _Stored(self._file, self.fingerprints["data"])
        rows = 0 if start.changed else stored.rows
        scoring = _Scoring(start, stored.answers, say, lambda found: stored.write(found, rows))
        try:
            rows = self._score(scoring, start, rows)
        except BaseException:
            scoring.keep()
            raise
        if not start.engine.process_group.rank:
            stored.write(scoring.answers(), rows)
        if scoring.empty:
            say.warning(
                f"{scoring.empty:,} of {scoring.pairs:,} pairs teach nothing: their answers are equal, or not within "
                f"data.sequence_length = {start.shape.sequence_length:,} tokens"
            )
        if start.engine.device.kind == "cpu":
            heap.trim()  # as a run does after each evaluation
        self._reference.take(scoring.answers())

    def _score(self, scoring: _Scoring, start: Start, rows: int) -> int:
        """Score what is trained and evaluated. As many `rows`, from the beginning of the first epoch on, are scored
        already; returns how many are now. Raises as `_Scoring.score` does."""
        for batch in start.trained:
            scoring.score(batch)
        if rows >= start.rows:
            return rows
        seen = 0
        for batch, count in self._trained(start.shape, start.rows):
            scoring.score(batch)
            seen += count
        for batch in self.validation(start.shape, 0):
            scoring.score(batch)
        return start.rows if seen >= start.rows else EVERY_ROW

    def _trained(self, shape: BatchShape, most: int) -> Iterator[tuple[Batch, int]]:
        """The first `most` rows of the first epoch, in the order of training, in batches of `shape`; and the number of
        rows in each batch."""
        rows = self.rows()
        answers, left = rows.epoch(1), most
        while left > 0:
            part: list[Any] = []
            while len(part) < min(shape.rows, left):
                try:
                    part.append(next(answers))
                except StopIteration:
                    left = 0
            if part:
                yield rows.batch(rows.join(part), shape)[0], len(part)
            left -= len(part)

    def judged(
        self,
        total: LossSum,
        shape: BatchShape,
        limit: int,
        engine: Engine,
        tick: Callable[[], None],
    ) -> Judged:
        """The means of the task's measures over pairs, and the loss of the reference."""
        found = super().judged(total, shape, limit, engine, tick)
        return Judged({"reference_loss": REFERENCE_LOSS, **found.metrics})

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        made = super().longest(first, shape)
        likelihoods = np.zeros(made["inputs"].shape[:-1], np.float32)
        return Batch({**made.arrays, "reference": likelihoods}, made.weight)


class _Scoring:
    """Scores the answers of batches that are not scored yet."""

    def __init__(
        self,
        start: Start,
        known: NDArray[np.void],
        say: Teller,
        keep: Callable[[NDArray[np.void]], None],
    ) -> None:
        """`known` answers are scored already. `keep` stores all that are; it is called by the first process."""
        self._start, self._say, self._keep = start, say, keep
        self._parts, self._known = [known], Reference(known)
        self._told, self._kept = -TOLD_SECONDS, time.monotonic()
        self.pairs = self.empty = 0
        """Pairs so far, and how many of them have nothing that is learned."""

    def score(self, batch: Batch) -> None:
        """Raises `DataError` if the starting weights are needed and gone, and `StopRequestedError`."""
        counts = (batch["targets"] != MASKED).any(-1)
        there = of_pairs(np.any(batch["inputs"] != 0, -1))
        self.pairs += int(np.count_nonzero(there))
        self.empty += int(np.count_nonzero(there & ~of_pairs(counts)))
        keys = keys_of(batch)
        new = counts & self._known.lacks(keys)
        if new.any():
            if not self._start.genuine:
                raise DataError(
                    f"the log-likelihoods in {FILE} of the run lack some answers, and the weights that training started "
                    "from are gone; put them or the file back, or start a new run"
                )
            found = np.empty(np.count_nonzero(new), SCORED)
            found["row"], found["likelihood"] = keys[new], self._start.engine.outputs(batch)[new[0]]
            self._parts.append(found)
            if time.monotonic() - self._told >= TOLD_SECONDS:
                self._told = time.monotonic()
                self._say.phase(
                    "reference", f"{self.pairs:,} pairs scored with the starting weights"
                )
            if time.monotonic() - self._kept >= KEPT_SECONDS:
                self.keep()
        if self._start.engine.process_group.size == 1:
            self._say.wait_while_paused()
        self._say.tick()

    def keep(self) -> None:
        """Store what is scored, if the disk takes it."""
        self._kept = time.monotonic()
        if not self._start.engine.process_group.rank:
            with contextlib.suppress(OSError):
                self._keep(self.answers())

    def answers(self) -> NDArray[np.void]:
        """All that are scored, of the type `SCORED`."""
        return each_once(np.concatenate(self._parts))


class _Stored:
    """What a run's directory holds: nothing if the file is missing or damaged."""

    def __init__(self, file: Path, data: str) -> None:
        """`data` is the fingerprint of the run's data. The file may be of other data, some of whose answers may be the
        same, so that they are kept."""
        self._file, self._data = file, data
        self.answers = np.empty(0, SCORED)
        self.rows = 0
        """Rows, from the beginning of the first epoch on, whose answers are among `answers`; so are all held-out ones."""
        try:
            with np.load(io.BytesIO(regular_file.read(file, MOST_BYTES))) as found:
                answers, rows, of = found["answers"], int(found["rows"]), str(found["data"])
        except (OSError, ValueError, EOFError, KeyError, TypeError, BadZipFile):
            return
        if answers.dtype == SCORED and answers.ndim == 1:
            self.answers, self.rows = answers, rows if of == data else 0

    def write(self, answers: NDArray[np.void], rows: int) -> None:
        """Replace the file, unless it holds as much."""
        if (rows, len(answers)) == (self.rows, len(self.answers)):
            return
        content = io.BytesIO()
        np.savez(content, answers=answers, rows=rows, data=self._data)
        write_atomic(self._file, content.getvalue())
        self.answers, self.rows = answers, rows
