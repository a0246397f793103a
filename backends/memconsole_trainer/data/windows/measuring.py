"""Measures the features and outputs of a window file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memconsole_trainer.data.windows.file import WindowFile, blocks
from memconsole_trainer.data.windows.split import TRAIN, WindowSplit
from memconsole_trainer.data.windows.statistics import Moments, WindowStatistics

MEASURED_ROWS = 200_000
"""Where there are more windows, about as many are measured, in blocks spread over the file."""


def measured(
    file: WindowFile, split: WindowSplit | None, tick: Callable[[], None], rows: int = MEASURED_ROWS
) -> WindowStatistics:
    """The statistics of the training rows of a file, or of all its rows. Raises `DataError`."""
    features, outputs = Moments(file.features), Moments(file.outputs)
    seen = 0
    for start, stop in blocks(file):
        if seen >= rows:
            break
        found = file.read(start, stop)
        if split is not None:
            found = found.take(np.flatnonzero(split.sides(start, stop) == TRAIN))
        features.add(found.windows.reshape(-1, file.features))
        outputs.add(found.targets, found.mask)
        seen += len(found.targets)
        tick()
    return WindowStatistics(features.statistics, outputs.statistics)
