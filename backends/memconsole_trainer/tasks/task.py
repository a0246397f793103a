"""Protocols that a task implements for the trainer: its data, its baselines and its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan
from memconsole.runs.record.log import events
from memconsole_trainer.data.sources.hashes import DataHashes
from memconsole_trainer.data.stream import BatchShape, Rows
from memconsole_trainer.engine import Batch, Engine, LossSum


class Teller(Protocol):
    """Reports what set-up is doing."""

    def phase(self, phase: str, detail: str = "") -> None:
        """Enter a phase. Raises `StopRequestedError`."""
        ...

    def warning(self, message: str) -> None: ...

    def tick(self) -> None:
        """Record that the process is alive. Raises `StopRequestedError`."""
        ...

    def wait_while_paused(self) -> None:
        """Wait while the run is paused. Only for a run of one process. Raises `StopRequestedError`."""
        ...


@dataclass(frozen=True)
class Judged:
    """The result of an evaluation in the task's own measures."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The task's baselines and measures, by key."""
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class Start:
    """A run with the weights that training starts from."""

    engine: Engine
    shape: BatchShape
    """That of an evaluation batch."""
    rows: int
    """Rows that are trained in the whole run, those of later epochs included."""
    trained: Iterable[Batch]
    """Training rows that are evaluated."""
    genuine: bool = True
    """Whether the engine holds these weights. If they are gone, it holds others until the checkpoint is loaded."""
    changed: bool = False
    """Whether the user agreed that the data have changed since the checkpoint."""


class TaskData(Protocol):
    """The data of one run, ready to train on."""

    description: str
    """One line for the log."""
    fingerprints: Mapping[str, str]
    """Hashes of what must not change when a run is resumed: "data"; for text also "tokenizer", for ratings
    "clustering", for standardized windows "standardization"."""
    hashes: DataHashes
    """Hashes of everything that was read so far."""
    validation_rows: int
    answered_records: int
    """How many held-out records `answered` looks at."""

    def fitted(self, model: Model) -> Model:
        """`model` with what it needs to know of the data: a recommender, which of its items the data lack."""
        ...

    def measure_start(self, start: Start, say: Teller) -> None:
        """Measure what training needs to know of the weights that it starts from, unless the run's directory holds it
        already. Raises `DataError` and `StopRequestedError`."""
        ...

    def rows(self, shuffle_buffer: int | None = None) -> Rows:
        """The training rows, shuffled in windows of `shuffle_buffer` rows; None: the plan's number of rows."""
        ...

    def steps_per_epoch(self, shape: BatchShape) -> int:
        """Optimizer steps of one epoch; estimated if the exact number needs a pass over all
        data."""
        ...

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        """Batches of the held-out rows, in the same order each time; at most `limit` unless it is
        0."""
        ...

    def judged(
        self,
        total: LossSum,
        shape: BatchShape,
        limit: int,
        engine: Engine,
        tick: Callable[[], None],
    ) -> Judged:
        """Turn the sums over these batches into the task's measures. Some tasks measure more with
        the engine. `tick` is called now and then in long computations and may raise."""
        ...

    def answered(self, engine: Engine, tick: Callable[[], None]) -> dict[str, float]:
        """Measures of what the model generates for held-out records, by key. `tick` is called
        between two generations and may raise."""
        ...

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        """A batch of `shape` without padding or masks, made from the rows of `first` if it is
        given."""
        ...

    def sample(self, engine: Engine, step: int) -> events.Sample | None:
        """A sample of the model's output for people to look at; None if the task has none."""
        ...

    def room_for_sample(self) -> bool:
        """Whether `sample` would return something."""
        ...


Opener = Callable[[Plan, Model, Path, Teller, Mapping[str, str]], TaskData]
"""Opens the data of a run, from its directory and the fingerprints in the checkpoint that it is resumed
from (none for a new run). Raises `PlanError` and `DataError`."""
