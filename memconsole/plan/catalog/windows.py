"""Files of windows of numbers, which regressors learn from: their datasets and widths."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from memconsole.once_per_version import once_per_version
from memconsole.plan.catalog.hdf5_shapes import dataset_shapes
from memconsole.plan.errors import PlanError

WINDOW_FILES = (".h5", ".hdf5")
DATASETS = ("input_sequences", "controls", "control_masks")
"""The datasets of a window file: (rows, length, features), (rows, outputs) and (rows, outputs). The last one may be
missing: then every output counts."""
MOST_WIDE = 65_536
"""The most features or outputs."""


class WindowSizes(NamedTuple):
    """The sizes of a file of windows."""

    rows: int
    length: int
    """The steps of a window."""
    features: int
    outputs: int


def too_long(where: object, length: int, steps: int) -> PlanError:
    """Why rows of `length` steps cannot be read from a file whose windows hold `steps`."""
    return PlanError(
        f"data.sequence_length = {length:,}: the windows of {where} hold {steps:,} steps; expected at most {steps:,}",
        "data.sequence_length",
    )


def window_sizes(where: str) -> WindowSizes | None:
    """The sizes of a file of windows; None if they cannot be read, or do not fit each other. The trainer says what is
    wrong with such a file."""
    if not where.lower().endswith(WINDOW_FILES):
        return None
    try:
        return _sizes(Path(where).expanduser().absolute())
    except (OSError, ValueError, RuntimeError):
        return None


@once_per_version(64)
def _sizes(path: Path) -> WindowSizes | None:
    shapes = dataset_shapes(path, DATASETS)
    windows, outputs = (shapes.get(name, ()) for name in DATASETS[:2])
    if len(windows) != 3 or len(outputs) != 2 or outputs != shapes.get(DATASETS[2], outputs):
        return None
    found = WindowSizes(*windows, outputs[1])
    wide = max(found.features, found.outputs) > MOST_WIDE
    return None if wide or min(found) < 1 else found
