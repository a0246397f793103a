"""Files of windows of numbers, which regressors learn from: their datasets and widths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from memconsole.once_per_version import once_per_version
from memconsole.plan.catalog.hdf5_shapes import damage, dataset_shapes
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
    """The sizes of a file of windows; None if they cannot be read, or do not fit each other, see `window_problem`."""
    if not where.lower().endswith(WINDOW_FILES):
        return None
    try:
        return _sizes(Path(where).expanduser().absolute())
    except (OSError, ValueError, RuntimeError):
        return None


@once_per_version(64)
def _sizes(path: Path) -> WindowSizes | None:
    shapes = dataset_shapes(path, DATASETS)
    if shapes is None or shape_problem(shapes) is not None:
        return None
    (rows, length, features), (_, outputs) = (shapes[name] for name in DATASETS[:2])
    found = WindowSizes(rows, length, features, outputs)
    return None if max(found.features, found.outputs) > MOST_WIDE else found


def window_problem(where: str) -> str | None:
    """Why no regressor can learn from a file; None if nothing tells so before the trainer opens it."""
    try:
        return _problem(Path(where).expanduser().absolute())
    except (OSError, ValueError, RuntimeError):
        return None


@once_per_version(64)
def _problem(path: Path) -> str | None:
    if (found := damage(path)) is not None:
        return found
    shapes = dataset_shapes(path, DATASETS)
    return None if shapes is None else shape_problem(shapes)


def shape_problem(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why datasets of these shapes are no windows to learn from; None if they are."""
    axes = {DATASETS[0]: "(windows, steps, features)", DATASETS[1]: "(windows, outputs)"}
    missing = [name for name in axes if name not in shapes]
    if missing:
        expected = " and ".join(f"{name} {of}" for name, of in axes.items())
        return f"lacks {' and '.join(missing)}; expected {expected}"
    windows, outputs = (shapes[name] for name in axes)
    for name, of in axes.items():
        if len(shapes[name]) != of.count(",") + 1:
            return f"{name} has shape {shapes[name]}; expected {of}"
    if not windows[0]:
        return "holds no windows"
    for name, of in axes.items():
        if not min(shapes[name][1:]):
            return f"{name} has shape {shapes[name]}; expected {of}, none of them 0"
    if outputs[0] != windows[0]:
        return f"{DATASETS[1]} has {outputs[0]:,} rows and {DATASETS[0]} {windows[0]:,}; expected as many"
    mask = shapes.get(DATASETS[2], outputs)
    if mask != outputs:
        return f"{DATASETS[2]} has shape {mask}; expected {outputs}, as {DATASETS[1]} has"
    return None
