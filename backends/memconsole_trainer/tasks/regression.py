"""Data of regression: batches of windows, and the measures of an evaluation besides the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memconsole.plan import catalog
from memconsole.plan.data.rows import keep_counted_rows
from memconsole.plan.models.model import Model
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan
from memconsole.runs.record.log import events
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.spread import evaluated, evaluated_rows
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.windows.file import MASK, WindowFile, Windows, blocks
from memconsole_trainer.data.windows.order import Row, WindowOrder, gathered
from memconsole_trainer.data.windows.split import HELD, UNSEEN, WindowSplit
from memconsole_trainer.data.windows.standardization import FINGERPRINT
from memconsole_trainer.engine import Batch, Engine, LossSum
from memconsole_trainer.systems.features import FEATURES, MOST_CONTROLS
from memconsole_trainer.tasks.closed_loop import Trials
from memconsole_trainer.tasks.linear_maps import (
    LinearMaps,
    last_step,
    predicted,
    predicted_of_windows,
)
from memconsole_trainer.tasks.standardizing import standardization_of
from memconsole_trainer.tasks.task import Judged, Start, Teller
from memconsole_trainer.tasks.window_errors import errors, losses

HELD_BYTES = 16 << 20
"""Most bytes of the rows kept for evaluation: of held-out trajectories, and of unseen families."""

STANDARDIZED = "features and outputs are standardized: the loss is in deviations of the outputs, errors are in the file's units"


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
        kind = "one trajectory" if file.has_trajectories else "one group of neighbouring rows"
        of = " of known systems" if split.unseen_rows else ""
        say.warning(
            f"nothing is held out for validation: the {split.train_rows:,} windows{of} are of {kind}"
        )
    elif d.validation_fraction and not file.has_trajectories:
        say.warning(
            f"{d.source} has no trajectory_ids: blocks of neighbouring windows are held out, so that a few "
            "validation windows overlap windows of training"
        )
    keep_counted_rows(plan, split.train_rows)
    say.phase("data", "measuring features")
    file.standardization = standardization_of(plan, file, split, directory, known, say)
    return WindowData(plan, file, split, say)


class WindowData:
    """Implements `TaskData`."""

    def __init__(self, plan: Plan, file: WindowFile, split: WindowSplit, say: Teller) -> None:
        self._plan, self._file, self._split = plan, file, split
        self._held, self._families = _rows_of_side(file, split, HELD, split.held_rows, say)
        self.validation_rows = len(self._held.targets)
        self._unseen, _ = _rows_of_side(file, split, UNSEEN, split.unseen_rows, say)
        self._maps = LinearMaps(file, split, say.tick)
        if not self._maps.counted:
            raise DataError(
                f"{file.path}: no output of the training rows counts: {MASK} is 0; expected 1 where an output counts"
            )
        if self.validation_rows and not self._held.mask.any():
            say.warning(f"no output of the held-out rows counts: {MASK} is 0")
        self._trials = self._closed_loop() if self.validation_rows else {}
        self._baselines: dict[str, float] | None = None
        unseen = ", ".join(file.families[i] for i in sorted(split.unseen))
        self.description = (
            f"{plan.data.source}: {file.count:,} windows, {split.train_rows:,} to train on, "
            f"{split.held_rows:,} held out"
            + (f", {split.unseen_rows:,} of systems never trained on ({unseen})" if unseen else "")
            + ("" if file.has_mask else f"; no {MASK}: every output counts")
            + (f"; {STANDARDIZED}" if file.standardization is not None else "")
        )
        self.fingerprints: dict[str, str] = {"data": file.fingerprint}
        if file.standardization is not None:
            self.fingerprints |= {FINGERPRINT: file.standardization.fingerprint}
        self.hashes = file.hashes
        self.answered_records = 0

    def fitted(self, model: Model) -> Model:
        return model

    def measure_start(self, start: Start, say: Teller) -> None:
        """Nothing needs to be known."""

    def rows(self, shuffle_buffer: int | None = None) -> WindowRows:
        return WindowRows(self._plan, self._file, self._split, shuffle_buffer)

    def steps_per_epoch(self, shape: BatchShape) -> int:
        return max(1, -(-self._split.train_rows // shape.rows))

    def validation(self, shape: BatchShape, limit: int) -> Iterator[Batch]:
        return _batches(self._held, shape, limit)

    def judged(
        self,
        total: LossSum,
        shape: BatchShape,
        limit: int,
        engine: Engine,
        tick: Callable[[], None],
    ) -> Judged:
        """The task's measures: those summed already, the loss on families that are never trained
        on, the cost of the model's control in closed loop, and the baselines of each."""
        if self._baselines is None:
            self._baselines = self._linear_losses(shape, limit) | self._linear_costs()
        held = self._held.mask[evaluated(self.validation_rows, shape.micro_batch, limit)]
        measures = errors(total, held.sum(0, dtype=np.float64), self._file.standardization)
        if len(self._unseen.targets):
            measures["unseen_loss"] = engine.evaluate(_batches(self._unseen, shape, limit)).mean
        for name, trials in self._trials.items():
            measures[f"{name}cost_ratio"] = _median(trials.ratios(self._policy(engine)))
        return Judged(self._baselines | measures)

    def answered(self, engine: Engine, tick: Callable[[], None]) -> dict[str, float]:
        return {}

    def longest(self, first: Batch | None, shape: BatchShape) -> Batch:
        if first is None:
            rows = self._file.read(0, min(shape.rows, self._file.count))
        else:
            arrays = (first[name] for name in ("windows", "targets", "mask"))
            rows = Windows(*(a.reshape(-1, *a.shape[2:]) for a in arrays))  # type: ignore[arg-type]
        rows = rows.take(np.arange(shape.rows) % len(rows.targets))
        return batch_of(rows._replace(mask=np.ones_like(rows.mask)), shape)

    def room_for_sample(self) -> bool:
        return False

    def sample(self, engine: Engine, step: int) -> events.Sample | None:
        return None

    def _closed_loop(self) -> dict[str, Trials]:
        """Trials by the beginning of their measures' names: of families that are never trained on,
        and of the others. Windows with other features than those of `systems.features` have no trials."""
        if (self._file.features, self._file.outputs) != (FEATURES, MOST_CONTROLS):
            return {}
        systems, noise = self._file.systems, self._file.noise
        sides = {
            "": [f for i, f in enumerate(systems) if i in self._split.unseen],
            "seen_": [f for i, f in enumerate(systems) if i not in self._split.unseen],
        }
        length = self._plan.data.sequence_length
        try:
            return {name: Trials(side, length, noise) for name, side in sides.items() if side}
        except ValueError as error:
            raise DataError(
                f"{self._file.path}: its systems cannot be controlled: {error}"
            ) from None

    def _policy(self, engine: Engine) -> Callable[[Any], Any]:
        """The model as a policy: windows in the units of the file -> outputs in these units."""

        def policy(windows: Any) -> Any:
            blank = np.zeros((len(windows), self._file.outputs), np.float32)
            shape = BatchShape(1, len(windows), windows.shape[1])
            return engine.outputs(batch_of(Windows(windows, blank, blank), shape))

        return self._in_units(policy)

    def _in_units(self, policy: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A policy of standardized windows and outputs as one in the units of the file."""
        standardization = self._file.standardization
        if standardization is None:
            return policy

        def in_units(windows: Any) -> Any:
            standardized = windows.copy()
            standardization.standardize_windows(standardized)
            return standardization.in_units(policy(standardized))

        return in_units

    def _linear_losses(self, shape: BatchShape, limit: int) -> dict[str, float]:
        """Losses on the held-out rows of zero output (of the mean output, if outputs are standardized), of linear maps of the
        last step and of the window, and of one of the last step per family; and of zero and the last step on unseen families."""
        rows = evaluated(len(self._held.targets), shape.micro_batch, limit)
        held = self._held.take(rows)
        unseen = self._unseen.take(evaluated(len(self._unseen.targets), shape.micro_batch, limit))
        zero = "zero" if self._file.standardization is None else "mean"
        last = last_step(held.windows)
        measured = losses(held, {zero: 0.0, "linear": predicted(self._maps.of_all, last)})
        if self._maps.of_windows is not None:
            predictions = predicted_of_windows(self._maps.of_windows, held.windows)
            measured |= losses(held, {"window": predictions})
        if self._families is not None:
            maps = self._maps.of_families[self._families[rows]]
            measured |= losses(held, {"ridge": predicted(maps, last)})
        if len(unseen.targets):
            predictions = predicted(self._maps.of_all, last_step(unseen.windows))
            measured |= losses(unseen, {f"unseen_{zero}": 0.0, "unseen_linear": predictions})
        return measured

    def _linear_costs(self) -> dict[str, float]:
        """Cost ratios of the same baselines in closed loop."""
        ratios = {}
        for name, trials in self._trials.items():
            unseen = self._split.unseen
            families = [i for i in range(len(self._file.systems)) if (i in unseen) == (name == "")]
            maps = self._maps.of_families[[families[family] for family, _ in trials.systems]]
            policies: dict[str, Callable[[Any], Any]] = {
                "zero": lambda windows: np.zeros((len(windows), self._file.outputs)),
                "linear": self._in_units(self._linear_policy(self._maps.of_all)),
                "ridge": self._in_units(self._linear_policy(maps)),
            }
            for key, policy in policies.items():
                ratios[f"{name}{key}_cost_ratio"] = _median(trials.ratios(policy))
        return ratios

    def _linear_policy(self, maps: Any) -> Callable[[Any], Any]:
        return lambda windows: predicted(maps, last_step(windows))


class WindowRows:
    """The training rows of a window file."""

    at_hand = True

    def __init__(
        self, plan: Plan, file: WindowFile, split: WindowSplit, shuffle_buffer: int | None = None
    ) -> None:
        self._file, self._split, self._seed = file, split, plan.train.seed
        self.shuffle_buffer = plan.data.shuffle_buffer if shuffle_buffer is None else shuffle_buffer
        self.row_bytes = file.row_bytes

    def epoch(self, epoch: int) -> WindowOrder:
        return WindowOrder(self._file, self._split, self._seed, epoch, self.shuffle_buffer)

    def after(self, iterator: object) -> None:
        return None

    def join(self, rows: list[Row]) -> Windows:
        return gathered(rows)

    def batch(self, joined: Windows, shape: BatchShape) -> tuple[Batch, int]:
        return batch_of(joined, shape), len(joined.targets)


def _batches(rows: Windows, shape: BatchShape, limit: int) -> Iterator[Batch]:
    """Evaluation batches of `rows`. A `limit` of them, 0 for none, is spread over all rows."""
    one = BatchShape(1, shape.micro_batch, shape.sequence_length)
    for numbers in evaluated_rows(len(rows.targets), shape.micro_batch, limit):
        yield batch_of(rows.take(numbers), one)


def batch_of(rows: Windows, shape: BatchShape) -> Batch:
    """A batch of at most `shape.rows` rows, padded with rows whose mask is zero."""
    arrays = {}
    for name, values in zip(("windows", "targets", "mask"), rows, strict=True):
        whole = values
        if len(values) < shape.rows:
            whole = np.zeros((shape.rows, *values.shape[1:]), np.float32)
            whole[: len(values)] = values
        arrays[name] = whole.reshape(shape.micro_batches, shape.micro_batch, *values.shape[1:])
    return Batch(arrays, float(rows.mask.sum()))


def _median(ratios: Any) -> float:
    return float(np.median(ratios))


def _rows_of_side(
    file: WindowFile, split: WindowSplit, side: int, rows: int, say: Teller
) -> tuple[Windows, Any]:
    """Rows of one side of the split, as many as fit into `HELD_BYTES`, from blocks spread over the
    file, and the numbers of their families; None if the file does not say them."""
    most, count = max(1, HELD_BYTES // file.row_bytes), 0
    parts, families = [file.empty(0)], [np.zeros(0, np.int64)]
    for start, stop in blocks(file):
        if count >= min(most, rows):
            break
        wanted = np.flatnonzero(split.sides(start, stop) == side)
        if len(wanted):
            parts.append(file.read(start, stop).take(wanted))
            count += len(wanted)
            if file.families:
                families.append(file.family_numbers(start, stop)[wanted])
        say.tick()
    whole = Windows(*(a[:most] for a in Windows.joined(parts)))
    return whole, np.concatenate(families)[:most] if file.families else None
