"""Linear maps of a window, or of its last step: the baselines of regression."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from memconsole_trainer.data.windows.file import WindowFile, blocks
from memconsole_trainer.data.windows.split import HELD, TRAIN, WindowSplit
from memconsole_trainer.host import mapped

FITTED_ROWS = 40_000
"""Maps are fitted to about this many rows."""
WIDEST = 2_000
"""The most numbers of a window that a map of whole windows takes."""
ROWS_PER_INPUT = 20
"""A map of whole windows is fitted to about this many rows for each number of a window, and to 10,000 at least."""
PART_ROWS = 256
"""Rows of whole windows that are in memory in float64 at a time."""
RIDGE = 1e-6
"""Share of each input's variance that is added to it, so that inputs that depend on one another do not make the
equations singular."""
CONSTANT = 1e-12
"""An input whose variance is a smaller share of its mean square is constant."""


class LinearMaps:
    """A map of the last step fitted to train rows of all families, one to the rows of each family, and a map of whole windows
    fitted to train rows.

    The maps of families that are held out whole are fitted to their own rows, which the model never sees. They
    show how well a linear map controls a known system.
    """

    def __init__(self, file: WindowFile, split: WindowSplit, tick: Callable[[], None]) -> None:
        families, outputs = len(file.families), file.outputs
        # Rows of no family are one family.
        last = [Equations(file.features + 1, outputs) for _ in range(max(families, 1))]
        trained = [own for place, own in enumerate(last) if place not in split.unseen]
        numbers_of_window = file.features * file.length
        whole = Equations(numbers_of_window + 1, outputs) if numbers_of_window <= WIDEST else None
        rows, wanted = 0, max(10_000, ROWS_PER_INPUT * numbers_of_window)
        for start, stop in blocks(file):
            sides = split.sides(start, stop)
            fitted = np.flatnonzero(sides != HELD)
            block = file.read(start, stop).take(fitted)
            targets, mask = block.targets.astype(np.float64), block.mask.astype(np.float64)
            numbers = np.zeros(len(fitted), np.int64)
            if families:
                numbers = file.family_numbers(start, stop)[fitted]
            steps = last_step(block.windows)
            for place in np.unique(numbers):
                own = numbers == place
                last[place].add(steps[own], targets[own], mask[own])
            if whole is not None and rows < wanted:
                for part in _parts(np.flatnonzero(sides[fitted] == TRAIN)):
                    whole.add(_whole_window(block.windows[part]), targets[part], mask[part])
            rows += len(fitted)
            tick()
            if rows >= FITTED_ROWS and any(equations.counted for equations in trained):
                break
        self.counted = sum(equations.counted for equations in trained)
        """How many outputs of train rows count, among those that the maps were fitted to."""
        self.of_all: Any = Equations.total(trained).solved()
        """(features + 1, outputs)"""
        self.of_families: Any = np.stack([own.solved() for own in last])[:families]
        """(families, features + 1, outputs)"""
        self.of_windows: Any = whole.solved() if whole is not None else None
        """(length * features + 1, outputs); None for windows of many numbers"""


class Equations:
    """The normal equations of linear maps from inputs, of which the last one is 1, to outputs. Each output has its own
    weight in each row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._shared = np.zeros((inputs, inputs))
        """Squares of rows in which every output counts fully."""
        self._own = mapped.empty((outputs, inputs, inputs), np.float64)
        """Squares of other rows, for each output."""
        self._products = np.zeros((outputs, inputs))
        self._alike = True
        self.counted = 0.0

    def add(self, x: Any, targets: Any, mask: Any) -> None:
        """Add rows: x (n, inputs), targets and mask (n, outputs)."""
        whole = (mask == 1).all(1)
        full = x[whole]
        self._shared += full.T @ full
        self._products += (mask * targets).T @ x
        self.counted += float(mask.sum())
        if whole.all():
            return
        self._alike = False
        for output in np.flatnonzero(mask[~whole].any(0)):
            rows = ~whole & (mask[:, output] > 0)
            part = x[rows] * np.sqrt(mask[rows, output, None])
            self._own[output] += part.T @ part

    @classmethod
    def total(cls, parts: Iterable[Equations]) -> Equations:
        """The equations of all rows of `parts`, at least one."""
        first, *others = parts
        found = cls(len(first._shared), len(first._own))
        for part in (first, *others):
            found._shared += part._shared
            found._products += part._products
            if not part._alike:
                found._own += part._own
                found._alike = False
        return found

    def solved(self) -> Any:
        """Maps (inputs, outputs)."""
        if self._alike:
            return _least_squares(self._shared, self._products.T)
        columns = [
            _least_squares(self._shared + own, products[:, None])
            for own, products in zip(self._own, self._products, strict=True)
        ]
        return np.concatenate(columns, axis=1)


def _least_squares(squares: Any, products: Any) -> Any:
    """Ridge regression with inputs in units of their deviations, so that their scales and means change nothing. The constant is
    free. Squares are (inputs, inputs), products and the maps (inputs, outputs)."""
    rows = max(float(squares[-1, -1]), 1e-300)
    means, output_means = squares[:-1, -1] / rows, products[-1] / rows
    centered = squares[:-1, :-1] - rows * np.outer(means, means)
    variances = np.diagonal(centered)
    varies = variances > CONSTANT * np.diagonal(squares)[:-1]
    per_deviation = np.where(varies, 1 / np.sqrt(np.where(varies, variances, 1)), 0.0)
    correlations = centered * np.outer(per_deviation, per_deviation) + RIDGE * np.eye(len(means))
    right = per_deviation[:, None] * (products[:-1] - rows * np.outer(means, output_means))
    slopes = per_deviation[:, None] * np.linalg.solve(correlations, right)
    return np.concatenate([slopes, (output_means - means @ slopes)[None]])


def predicted(maps: Any, inputs: Any) -> Any:
    """The outputs of linear maps for `inputs` (n, inputs). Maps are (inputs, outputs), or (n, inputs, outputs) with
    one for each row."""
    return inputs @ maps if maps.ndim == 2 else np.einsum("ni,nio->no", inputs, maps)


def last_step(windows: Any) -> Any:
    """The inputs of a map of the last step: (n, features + 1) of windows (n, length, features)."""
    return _with_one(windows[:, -1])


def predicted_of_windows(maps: Any, windows: Any) -> Any:
    """The outputs (n, outputs) of a map of whole windows for windows (n, length, features)."""
    rows = _parts(np.arange(len(windows)))
    return np.concatenate([predicted(maps, _whole_window(windows[part])) for part in rows])


def _parts(rows: Any) -> list[Any]:
    return np.split(rows, range(PART_ROWS, len(rows), PART_ROWS))


def _whole_window(windows: Any) -> Any:
    """The inputs of a map of whole windows: (n, length * features + 1)."""
    return _with_one(windows.reshape(len(windows), -1))


def _with_one(rows: Any) -> Any:
    return np.concatenate([rows.astype(np.float64), np.ones((len(rows), 1))], axis=1)
