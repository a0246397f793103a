"""Some training rows, the same ones at every evaluation. Their loss is compared with that of held-out rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from memconsole.plan.plan import Plan
from memconsole_trainer.data.stream import BatchShape, Rows
from memconsole_trainer.engine import Batch
from memconsole_trainer.tasks.task import TaskData

SPREAD = 16
"""The rows are drawn from this many times their number, so that they are not all from one document."""


@dataclass(frozen=True)
class TrainedRows:
    """Rows in the compact form in which they wait in the queue, one entry per batch."""

    rows: Rows
    joined: tuple[Any, ...]
    shape: BatchShape

    def batches(self) -> Iterator[Batch]:
        """Yield the batches, in the same order each time."""
        for joined in self.joined:
            yield self.rows.batch(joined, self.shape)[0]


def evaluation_shape(plan: Plan, shape: BatchShape) -> BatchShape:
    """The shape of one evaluation batch of a run whose steps have batches of `shape`."""
    rows = plan.evaluation_batch * plan.device.count
    return dataclasses.replace(shape, micro_batches=1, micro_batch=rows)


def trained_rows(
    plan: Plan, data: TaskData, shape: BatchShape, tick: Callable[[], None]
) -> TrainedRows | None:
    """Read the rows from the beginning of the first epoch: at most as many batches as there are of
    held-out rows, fewer if the epoch is shorter. None if there are none.

    Call this before a stream of the same data begins, because both read the same blocks. `tick` is
    called before each batch and may raise. Raises what the source raises.
    """
    t, one = plan.train, evaluation_shape(plan, shape)
    held = -(-data.validation_rows // one.rows)
    counts = (t.evaluation_train_batches, t.evaluation_batches)
    asked, limit = (plan.evaluation_batches(count) for count in counts)
    wanted = min(asked, held, limit or held)
    if not wanted:
        return None
    rows = data.rows(min(plan.data.shuffle_buffer, SPREAD * wanted * one.rows))
    iterator, ended = rows.epoch(1), False
    found: list[Any] = []
    while len(found) < wanted and not ended:
        tick()
        part: list[Any] = []
        while len(part) < one.rows and not ended:
            try:
                part.append(next(iterator))
            except StopIteration:
                ended = True
        if part:
            found.append(rows.join(part))
    return TrainedRows(rows, tuple(found), one) if found else None
