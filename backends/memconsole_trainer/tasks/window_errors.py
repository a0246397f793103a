"""Errors of a regressor on windows, in the units of the file, and losses of its baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memconsole.plan.tasks.regression import LISTED_OUTPUTS, rmse_key
from memconsole_trainer.data.windows.file import Windows
from memconsole_trainer.data.windows.standardization import Standardization
from memconsole_trainer.engine import LossSum


def errors(
    total: LossSum, counts: Any, standardization: Standardization | None
) -> dict[str, float]:
    """The errors of an evaluation in the units of the file, by key. `counts` (outputs,) says how often each output counted."""
    outputs, weight = len(counts), max(total.weight, 1e-9)
    deviations = np.ones(outputs)
    if standardization is not None:
        deviations = np.array(standardization.output_deviations)
    squares, absolute = np.array(total.measures or np.zeros(2 * outputs)).reshape(2, outputs)
    found = {"mean_absolute_error": float(absolute @ deviations) / weight}
    squares = squares * deviations**2
    if standardization is not None:
        found["units_loss"] = float(squares.sum()) / weight
    each = np.sqrt(squares / np.maximum(counts, 1e-9))
    counted = np.flatnonzero(counts)
    if outputs <= LISTED_OUTPUTS:
        return found | {rmse_key(output): float(each[output]) for output in counted.tolist()}
    if len(counted):
        found |= {"least_rmse": float(each[counted].min()), "most_rmse": float(each[counted].max())}
    return found


def losses(rows: Windows, guesses: Mapping[str, Any]) -> dict[str, float]:
    """The masked mean squared error of each guess, named `<guess>_loss`."""
    mask, targets = rows.mask.astype(np.float64), rows.targets.astype(np.float64)
    weight = max(float(mask.sum()), 1e-9)
    return {
        f"{name}_loss": float((mask * (guess - targets) ** 2).sum()) / weight
        for name, guess in guesses.items()
    }
