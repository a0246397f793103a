"""Says in a few lines which numbers a window file holds."""

from __future__ import annotations

from collections.abc import Sequence

from memconsole_trainer.data.windows.file import WindowFile
from memconsole_trainer.data.windows.measuring import measured
from memconsole_trainer.data.windows.standardization import out_of_scale
from memconsole_trainer.data.windows.statistics import Statistics

LOOKED_AT = 20_000
"""About as many windows are looked at."""
LISTED = 6
"""The most features, or outputs, that have a line each."""


def statistics_lines(file: WindowFile) -> list[str]:
    """Range, mean and deviation of each feature and output, or the ranges of these if there are many; and what
    `data.standardize = auto` does. Raises `DataError`."""
    found = measured(file, None, lambda: None, LOOKED_AT)
    inputs, outputs = file.columns
    lines = [*_lines("feature", found.features, inputs), *_lines("output", found.outputs, outputs)]
    if file.says_normalized:
        done = "trains on them as they are: the file says that they are normalized"
    elif out_of_scale(found):
        done = "standardizes them"
    else:
        done = "trains on them as they are"
    return [*lines, f"data.standardize = auto {done}"]


def _lines(name: str, found: Statistics, columns: Sequence[str]) -> list[str]:
    count = len(found.mean)
    named = len(columns) == count
    names = [columns[i] if named else f"{name} {i + 1}" for i in range(count)]
    if count > LISTED:
        means, deviations = (
            f"{min(values):.4g} to {max(values):.4g}" for values in (found.mean, found.deviation)
        )
        lowest, highest = min(found.least), max(found.most)
        return [
            f"{count:,} {name}s: {lowest:.4g} to {highest:.4g}, means {means}, deviations {deviations}"
        ]
    return [
        f"{names[i]}: counts in no row"
        if not found.count[i]
        else f"{names[i]}: {found.least[i]:.4g} to {found.most[i]:.4g}, mean {found.mean[i]:.4g}, "
        f"deviation {found.deviation[i]:.4g}"
        for i in range(count)
    ]
