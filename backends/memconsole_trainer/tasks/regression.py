"""Data of regression: batches of windows, and the losses of two simple baseline models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memconsole.plan import catalog
from memconsole.plan.model import Model
from memconsole.plan.plan import Plan
from memconsole.plan.regressor import Regressor
from memconsole.plan.tasks import task_of
from memconsole.runs.record import events
from memconsole_trainer.data.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.windows import (
    WindowFile,
    WindowOrder,
    Windows,
    WindowSplit,
    blocks,
)
from memconsole_trainer.engine import Batch, Engine, LossSum
from memconsole_trainer.tasks.task import Judged, Teller

HELD_BYTES = 16 << 20
"""Most bytes of held-out rows kept for evaluation."""
FITTED_ROWS = 20_000
"""The linear map is fitted to about this many train rows."""
RIDGE = 1e-3
"""Ridge term per fitted row, so that constant features do not make the system singular."""


def open_data(
    plan: Plan, model: Model, directory: Path, say: Teller, known: Mapping[str, str]
) -> WindowData:
    """Open the file of a run, split it and read its held-out rows. Raises `PlanError` and
    `DataError`."""
    assert isinstance(model, Regressor)
    say.phase("data", plan.data.source)
    path = Path(catalog.dataset(plan).where).expanduser()
    d = plan.data
    file = WindowFile(path, model.features, model.outputs, d.sequence_length, d.max_examples)
    say.phase("data", "splitting")
    split = WindowSplit(file, d.validation_fraction, say.tick)
    if not split.train_rows:
        raise DataError(f"{d.source}: holds no windows to train on")
    if d.validation_fraction and not split.held_rows:
        say.warning("nothing is held out for validation: the data is a single trajectory")
    return WindowData(plan, file, split, _held(file, split, say), _linear_map(file, split, say))


class WindowData:
    """Implements `TaskData`."""

    def __init__(
        self, plan: Plan, file: WindowFile, split: WindowSplit, held: Windows, linear: Any
    ) -> None:
        self._plan, self._file, self._split = plan, file, split
        self._held, self._linear = held, linear
        self._baselines: dict[str, float] | None = None
        self.description = (
            f"{plan.data.source}: {file.count:,} windows, {split.train_rows:,} to train on, "
            f"{split.held_rows:,} held out"
        )
        self.fingerprints: Mapping[str, str] = {"data": file.fingerprint}
        self.hashes = file.hashes
        self.validation_rows = len(held.targets)
        self.answered_records = 0

    def rows(self) -> WindowRows:
        return WindowRows(self._plan, self._file, self._split)

    def steps_per_epoch(self, shape: BatchShape) -> int:
        return max(1, -(-self._split.train_rows // shape.rows))

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        rows = shape.micro_batch
        for number, start in enumerate(range(0, self.validation_rows, rows)):
            if limit and number >= limit:
                return
            part = Windows(*(a[start : start + rows] for a in self._held))
            yield _batch(part, BatchShape(1, rows, shape.sequence_length))

    def judged(self, total: LossSum, shape: BatchShape, limit: int) -> Judged:
        """The task's measures, and two baseline losses: of predicting zero, and of a linear map of
        the window's last step."""
        if self._baselines is None:
            self._baselines = self._measured(shape, limit)
        task = task_of(self._plan)
        own = zip(task.measures, total.measures, strict=True)
        return Judged(
            self._baselines | {m.key: value / max(total.weight, 1e-9) for m, value in own}
        )

    def answered(self, engine: Engine, tick: Callable[[], None]) -> dict[str, float]:
        return {}

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        if first is None:
            found = self._file.read(0, min(shape.rows, self._file.count))
        else:
            arrays = (first[name] for name in ("windows", "targets", "mask"))
            found = Windows(*(a.reshape(-1, *a.shape[2:]) for a in arrays))  # type: ignore[arg-type]
        found = found.take(np.arange(shape.rows) % len(found.targets))
        return _batch(found._replace(mask=np.ones_like(found.mask)), shape)

    def room_for_sample(self) -> bool:
        return False

    def sample(self, engine: Engine, step: int) -> events.Sample | None:
        return None

    def _measured(self, shape: BatchShape, limit: int) -> dict[str, float]:
        zero = linear = weight = 0.0
        for batch in self.validation(shape, limit):
            windows, targets, mask = (
                batch[name][0].astype(np.float64) for name in ("windows", "targets", "mask")
            )
            guess = _with_one(windows[:, -1]) @ self._linear
            zero += float((mask * targets**2).sum())
            linear += float((mask * (guess - targets) ** 2).sum())
            weight += float(mask.sum())
        weight = max(weight, 1e-9)
        return {"zero_loss": zero / weight, "linear_loss": linear / weight}


class WindowRows:
    """The training rows of a window file."""

    def __init__(self, plan: Plan, file: WindowFile, split: WindowSplit) -> None:
        self._file, self._split, self._seed = file, split, plan.train.seed
        self.shuffle_buffer = plan.data.shuffle_buffer
        self.row_bytes = file.row_bytes

    def epoch(self, epoch: int) -> WindowOrder:
        return WindowOrder(self._file, self._split, self._seed, epoch, self.shuffle_buffer)

    def join(self, rows: list[Windows]) -> Windows:
        return Windows(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))

    def batch(self, joined: Windows, shape: BatchShape) -> tuple[Batch, int]:
        return _batch(joined, shape), len(joined.targets)


def _batch(rows: Windows, shape: BatchShape) -> Batch:
    """A batch of at most `shape.rows` rows, padded with rows whose mask is zero."""
    arrays = {}
    for name, values in zip(("windows", "targets", "mask"), rows, strict=True):
        whole = np.zeros((shape.rows, *values.shape[1:]), np.float32)
        whole[: len(values)] = values
        arrays[name] = whole.reshape(shape.micro_batches, shape.micro_batch, *values.shape[1:])
    return Batch(arrays, float(rows.mask.sum()))


def _held(file: WindowFile, split: WindowSplit, say: Teller) -> Windows:
    """The first held-out rows, as many as fit into `HELD_BYTES`."""
    most, found = max(1, HELD_BYTES // file.row_bytes), 0
    parts = [file.read(0, 1).take(np.zeros(0, np.int64))]
    for start, stop in blocks(file):
        held = split.held_out(start, stop)
        if held.any():
            parts.append(file.read(start, stop).take(held))
            found += int(held.sum())
        say.tick()
        if found >= most or found == split.held_rows:
            break
    return Windows(*(np.concatenate(a)[:most] for a in zip(*parts, strict=True)))


def _linear_map(file: WindowFile, split: WindowSplit, say: Teller) -> Any:
    """Fit a ridge regression (features + 1, outputs) on the last step of the windows of the first
    train rows."""
    size = None
    fitted = 0
    for start, stop in blocks(file):
        rows = file.read(start, stop).take(~split.held_out(start, stop))
        last = _with_one(rows.windows[:, -1].astype(np.float64))
        if size is None:
            outputs = rows.targets.shape[1]
            size = np.zeros((outputs, last.shape[1], last.shape[1]))
            wanted = np.zeros((outputs, last.shape[1]))
        mask = rows.mask.astype(np.float64)
        size += np.einsum("no,ni,nj->oij", mask, last, last, optimize=True)
        wanted += np.einsum("no,no,ni->oi", mask, rows.targets.astype(np.float64), last)
        fitted += len(rows.targets)
        say.tick()
        if fitted >= FITTED_ROWS:
            break
    assert size is not None
    size += RIDGE * max(fitted, 1) * np.eye(size.shape[-1])
    return np.linalg.solve(size, wanted[..., None])[..., 0].T


def _with_one(features: Any) -> Any:
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)
