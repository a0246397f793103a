"""Data of preferences: pairs of answers, and what the model that training starts from thinks of them."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole import regular_file
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.tasks.language import MASKED
from memconsole.plan.tasks.preference import PREFERENCE, REFERENCE_LOSS
from memconsole.runs.record.files import write_atomic
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.rows.batches import TextRows
from memconsole_trainer.data.text.rows.pairs import SCORED, PairRows, Reference, keys_of
from memconsole_trainer.engine import Batch, Engine, LossSum
from memconsole_trainer.host import heap
from memconsole_trainer.tasks.language import LanguageData, Opened, opened_text
from memconsole_trainer.tasks.task import Judged, Teller

FILE = "reference.npy"
"""The file in the run's directory that holds the likelihoods."""
MOST_BYTES = 1 << 34
TOLD_SECONDS = 5.0
"""Seconds between two reports of how many answers are scored."""


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> PreferenceData:
    """Open the data of a run. Raises `PlanError` and `DataError`."""
    return PreferenceData(opened_text(plan, model, directory, say, known), directory)


class PreferenceData(LanguageData):
    """Implements `TaskData`."""

    def __init__(self, opened: Opened, directory: Path) -> None:
        super().__init__(*opened)
        self._file = directory / FILE
        self._reference = Reference()

    def measure_start(self, engine: Engine, shape: BatchShape, resumed: bool, say: Teller) -> None:
        """Read or compute the log-likelihood of every answer under the starting weights, so that training needs no second
        model."""
        if resumed:
            self._reference.take(_read(self._file))
            return
        began, parts = time.monotonic(), []
        pairs = 0
        say.phase("reference", "scoring answers with the starting weights")
        for batch in self._batches(shape):
            counts = (batch["targets"] != MASKED).any(-1)
            likelihoods = engine.outputs(batch)[counts[0]]
            parts.append(np.empty(len(likelihoods), SCORED))
            parts[-1]["row"], parts[-1]["likelihood"] = keys_of(batch)[counts], likelihoods
            pairs += int(batch.weight)
            if time.monotonic() - began > TOLD_SECONDS:
                began = time.monotonic()
                say.phase("reference", f"{pairs:,} pairs scored with the starting weights")
            say.tick()
        scored = np.concatenate([np.empty(0, SCORED), *parts])
        if engine.device.kind == "cpu":
            heap.trim()  # as a run does after each evaluation
        if not engine.gang.rank:
            content = io.BytesIO()
            np.save(content, scored)
            write_atomic(self._file, content.getvalue())
        self._reference.take(scored)

    def _batches(self, shape: BatchShape) -> Iterator[Batch]:
        """Every training pair and every held-out pair, in batches of `shape`."""
        rows = self.rows(0)
        answers, ended = rows.epoch(1), False
        while not ended:
            part: list[Any] = []
            while len(part) < shape.rows and not ended:
                try:
                    part.append(next(answers))
                except StopIteration:
                    ended = True
            if part:
                yield rows.batch(rows.join(part), shape)[0]
        yield from self.validation(shape, 0)

    def rows(self, shuffle_buffer: int | None = None) -> PairRows:
        pairs = super().rows(shuffle_buffer)
        assert isinstance(pairs, TextRows)
        return PairRows(pairs, self._reference)

    def steps_per_epoch(self, shape: BatchShape) -> int:
        pairs = dataclasses.replace(shape, micro_batch=shape.micro_batch // 2)
        return super().steps_per_epoch(pairs)

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        return map(self._reference.attached, super().validation(shape, limit))

    def judged(
        self,
        total: LossSum,
        shape: BatchShape,
        limit: int,
        engine: Engine,
        tick: Callable[[], None],
    ) -> Judged:
        """The means of the task's measures over pairs, and the loss of the reference."""
        own = zip(PREFERENCE.measures, total.measures, strict=True)
        means = {m.key: value / max(total.weight, 1.0) for m, value in own}
        return Judged({"reference_loss": REFERENCE_LOSS, **means})

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        made = super().longest(first, shape)
        likelihoods = np.zeros(made["inputs"].shape[:-1], np.float32)
        return Batch({**made.arrays, "reference": likelihoods}, shape.rows / 2)


def _read(file: Path) -> NDArray[np.void]:
    """The likelihoods that a run keeps. Raises `DataError`."""
    try:
        found: NDArray[np.void] = np.load(io.BytesIO(regular_file.read(file, MOST_BYTES)))
    except (OSError, ValueError, EOFError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(
            f"{file}: cannot be read ({why}); it holds the log-likelihoods under the starting weights, which a checkpoint does "
            "not tell; put it back, or begin again: memconsole resume RUN --from-scratch"
        ) from None
    if found.dtype != SCORED:
        raise DataError(f"{file}: holds no likelihoods of answers; put it back")
    return found
