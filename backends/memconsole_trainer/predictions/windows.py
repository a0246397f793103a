"""Predicts the outputs of the windows of a file."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memconsole.plan.catalog.windows import DATASETS
from memconsole.plan.models.regressor import Regressor
from memconsole.units import format_bytes
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.windows.column_names import check_inputs
from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.standardization import FINGERPRINT, of_checkpoint
from memconsole_trainer.tasks.regression import batch_of
from memconsole_trainer.weights.trained import TrainedModel

OUTPUTS, NORMALIZED = "outputs", "normalized_outputs"


def write(trained_model: TrainedModel, source: Path, out: Path, warn: Callable[[str], None]) -> str:
    """Write the predictions for all windows of `source` to `out`, an HDF5 file with two datasets (rows, outputs)
    in float32: `NORMALIZED`, on the scale of the controls in the file that the run was trained with, and
    `OUTPUTS`, multiplied by what the file says that controls were divided by. A run that standardizes does so with the
    windows, and its outputs are put back on that scale. Outputs that a system does not
    have are zero in `OUTPUTS`. Returns what was written, in words.
    Raises `DataError`, `PlanError`, `WeightsError` and OSError.

    A block of the file, and the outputs of a batch, are in memory at a time.
    """
    import h5py

    model, length = trained_model.model, trained_model.plan.data.sequence_length
    assert isinstance(model, Regressor)
    file = WindowFile(source, model.features, model.outputs, length, None, DATASETS[:1])
    check_inputs(source, file.columns, Path(trained_model.plan.data.source).expanduser())
    scales = file.output_scales()
    standardization = of_checkpoint(
        trained_model.directory, trained_model.checkpoint.fingerprints.get(FINGERPRINT)
    )
    file.standardization = standardization
    if scales is None and standardization is None and not file.columns.inputs:
        warn(
            f"{source} does not say what controls were divided by (system_ids and normalization): "
            f"{OUTPUTS} are the {NORMALIZED}"
        )
    size = (file.count, model.outputs)
    _check_room(out.parent, 2 * 4 * file.count * model.outputs)
    engine = trained_model.engine()
    shape = BatchShape(1, trained_model.plan.evaluation_batch, length)
    with _WritesOn(out) as raw:
        with h5py.File(raw, "w") as made:
            outputs, normalized = (
                made.create_dataset(name, size, np.float32) for name in (OUTPUTS, NORMALIZED)
            )
            for start in range(0, file.count, file.block_rows):
                stop = min(start + file.block_rows, file.count)
                windows = file.read(start, stop)
                block = np.empty((stop - start, model.outputs), np.float32)
                for at in range(0, len(block), shape.rows):
                    part = block[at : at + shape.rows]
                    batch = batch_of(windows.take(np.arange(at, at + len(part))), shape)
                    part[...] = engine.outputs(batch)[: len(part)]
                if standardization is not None:
                    block = standardization.in_units(block)
                normalized[start:stop] = block
                scale = 1.0 if scales is None else scales[file.family_numbers(start, stop)]
                outputs[start:stop] = block * scale + 0.0  # no negative zeros
                if raw.error is not None:
                    break
        if raw.error is not None:
            raise raw.error
    return f"outputs of {file.count:,} window{'s' if file.count != 1 else ''}"


def _check_room(folder: Path, needed: int) -> None:
    """Raise `DataError` if the disk of `folder` has less room than `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder}: {format_bytes(free)} free, the outputs take {format_bytes(needed)}"
        )


class _WritesOn(io.FileIO):
    """A new file for HDF5, which ends the process if it closes a file that it could not write. So the first error is
    kept in `error`, and what comes after it is dropped."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self.error: BaseException | None = None

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        if self.error is None:
            try:
                left = memoryview(content).cast("B")
                while left:
                    left = left[super().write(left) :]
            except (OSError, KeyboardInterrupt) as error:
                self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0
