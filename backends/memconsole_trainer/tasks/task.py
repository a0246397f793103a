"""What a task brings to a run: its data opened and cut, its baselines, its sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from memconsole.plan.model import Model
from memconsole.plan.plan import Plan
from memconsole.runs.record import events
from memconsole_trainer.data.stream import BatchShape, Rows
from memconsole_trainer.engine import Batch, Engine, LossSum


class Teller(Protocol):
    """Says what set-up is doing."""

    def phase(self, phase: str, detail: str = "") -> None:
        """Enter a phase. Raises `StopRequestedError`."""
        ...

    def warning(self, message: str) -> None: ...

    def tick(self) -> None:
        """A sign of life. Raises `StopRequestedError`."""
        ...


@dataclass(frozen=True)
class Judged:
    """An evaluation in the task's own terms."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The task's baselines and measures by key."""
    bits_per_byte: float | None = None


class TaskData(Protocol):
    """The data of one run, ready to train on."""

    description: str
    """One line for a person."""
    fingerprints: Mapping[str, str]
    """Of what a resumed run must find unchanged: "data" and, for text, "tokenizer"."""
    validation_rows: int

    def rows(self) -> Rows:
        """The training rows."""
        ...

    def steps_per_epoch(self, shape: BatchShape) -> int:
        """Optimizer steps of one epoch: exact, or estimated where only reading it all would tell."""
        ...

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        """The held-out rows, in the same order at every evaluation; `limit` batches unless 0."""
        ...

    def judged(self, total: LossSum, shape: BatchShape, limit: int) -> Judged:
        """What the sums over those batches come to."""
        ...

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        """A batch of `shape` in which everything counts, made of the rows of `first` where there is one."""
        ...

    def sample(self, engine: Engine, step: int) -> events.Sample | None:
        """Something that the model makes, for a person to look at; None where there is nothing."""
        ...

    def room_for_sample(self) -> bool:
        """Whether `sample` would make something."""
        ...


Opener = Callable[[Plan, Model, Path, Teller], TaskData]
"""Opens the data of the run in a directory. Raises `PlanError` and `DataError`."""
