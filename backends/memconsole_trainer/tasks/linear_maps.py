"""Linear maps of a window's last step: the baselines of regression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from memconsole_trainer.data.windows.file import WindowFile, Windows, blocks
from memconsole_trainer.data.windows.split import HELD, WindowSplit

FITTED_ROWS = 40_000
"""Maps are fitted to about this many rows."""
RIDGE = 1e-6
"""Ridge term per fitted row, so that constant features do not make the equations singular."""


class LinearMaps:
    """A map fitted to train rows of all families, and one to the rows of each family.

    The maps of families that are held out whole are fitted to their own rows, which the model never sees. They
    show how well a linear map controls a known system.
    """

    def __init__(self, file: WindowFile, split: WindowSplit, tick: Callable[[], None]) -> None:
        families, inputs, outputs = len(file.families), file.features + 1, file.outputs
        # Normal equations of each family; rows of no family are one.
        squares = np.zeros((max(families, 1), outputs, inputs, inputs))
        products = np.zeros((max(families, 1), outputs, inputs))
        rows = np.zeros(max(families, 1))
        for start, stop in blocks(file):
            fitted = np.flatnonzero(split.sides(start, stop) != HELD)
            last, targets, mask = _parts(file.read(start, stop).take(fitted))
            numbers = np.zeros(len(fitted), np.int64)
            if families:
                numbers = file.family_numbers(start, stop)[fitted]
            for place in np.unique(numbers):
                x, own = last[numbers == place], mask[numbers == place]
                weighed = x[:, None] * own[..., None]  # (n, outputs, inputs)
                squares[place] += np.tensordot(weighed, x, (0, 0))
                products[place] += np.einsum("noi,no->oi", weighed, targets[numbers == place])
                rows[place] += len(x)
            tick()
            trained = [place for place in range(len(rows)) if place not in split.unseen]
            self.counted = float(squares[trained, :, -1, -1].sum())
            """How many outputs of train rows count, among those that the maps were fitted to."""
            if rows.sum() >= FITTED_ROWS and self.counted:
                break
        self.of_all: Any = _solved(*(part[trained].sum(0) for part in (squares, products, rows)))
        """(features + 1, outputs)"""
        self.of_families: Any = _solved(squares, products, rows)[:families]
        """(families, features + 1, outputs)"""


def _solved(squares: Any, products: Any, rows: Any) -> Any:
    """Maps (..., inputs, outputs) of the normal equations of `rows` rows (...)."""
    ridge = RIDGE * np.maximum(rows, 1)[..., None, None, None] * np.eye(squares.shape[-1])
    maps = np.linalg.solve(squares + ridge, products[..., None])[..., 0]
    return np.swapaxes(maps, -1, -2)


def predicted(maps: Any, windows: Any) -> Any:
    """The outputs of linear maps for windows (n, length, features). Maps are (inputs, outputs), or (n, inputs, outputs) with
    one for each row."""
    last = _with_one(windows)
    return last @ maps if maps.ndim == 2 else np.einsum("ni,nio->no", last, maps)


def _parts(rows: Windows) -> tuple[Any, Any, Any]:
    return _with_one(rows.windows), rows.targets.astype(np.float64), rows.mask.astype(np.float64)


def _with_one(windows: Any) -> Any:
    last = windows[:, -1].astype(np.float64)
    return np.concatenate([last, np.ones((len(last), 1))], axis=1)
