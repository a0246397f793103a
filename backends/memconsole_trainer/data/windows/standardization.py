"""What the features and outputs of a run's windows are standardized with: it is kept in the run's directory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from memconsole import regular_file, typed_json
from memconsole.runs.record import files
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.windows.statistics import Statistics, WindowStatistics

STANDARDIZATION_JSON = "standardization.json"
FINGERPRINT = "standardization"
"""Its name among the fingerprints of a checkpoint."""
MOST_BYTES = 16 << 20
LEAST_DEVIATION, MOST_DEVIATION = 0.05, 20.0
"""Numbers with such deviations are trained on as they are."""
MOST_DEVIATIONS_FROM_ZERO = 5.0
"""... if their mean is at most as many deviations from zero; a constant, at most `MOST_DEVIATION`."""

Numbers = tuple[float, ...]


class Standardization(msgspec.Struct, frozen=True, kw_only=True):
    """Means and deviations of the training rows. A feature or an output that does not vary has the deviation 1."""

    feature_means: Numbers
    feature_deviations: Numbers
    output_means: Numbers
    output_deviations: Numbers

    @classmethod
    def of(cls, found: WindowStatistics) -> Standardization:
        deviations = (np.where(s.deviation > 0, s.deviation, 1.0).tolist() for s in found)
        features, outputs = map(tuple, deviations)
        return cls(
            feature_means=tuple(found.features.mean.tolist()),
            feature_deviations=features,
            output_means=tuple(found.outputs.mean.tolist()),
            output_deviations=outputs,
        )

    def standardize_windows(self, windows: Any) -> None:
        """Standardize windows (n, length, features) in place."""
        windows -= np.array(self.feature_means, np.float32)
        windows /= np.array(self.feature_deviations, np.float32)

    def standardize_targets(self, targets: Any, mask: Any) -> None:
        """Standardize targets (n, outputs) in place. Those that the mask does not count are 0."""
        targets -= np.array(self.output_means, np.float32)
        targets /= np.array(self.output_deviations, np.float32)
        targets[mask == 0] = 0

    def in_units(self, outputs: Any) -> Any:
        """Outputs (n, outputs) of the model in the units of the file."""
        return outputs * np.array(self.output_deviations) + np.array(self.output_means)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def out_of_scale(found: WindowStatistics) -> bool:
    """Whether numbers with these statistics are standardized by `data.standardize = auto`."""
    return any(_out_of_scale(one) for one in found)


def _out_of_scale(found: Statistics) -> bool:
    varies, means = found.deviation > 0, np.abs(found.mean)
    deviations = found.deviation[varies]
    return bool(
        (deviations < LEAST_DEVIATION).any()
        or (deviations > MOST_DEVIATION).any()
        or (means[varies] > MOST_DEVIATIONS_FROM_ZERO * deviations).any()
        or (means[~varies] > MOST_DEVIATION).any()
    )


def keep(directory: Path, found: Standardization) -> None:
    files.write_atomic(directory / STANDARDIZATION_JSON, msgspec.json.encode(found))


def kept(directory: Path) -> Standardization | None:
    """What the run in `directory` standardizes with; None if it does not. Raises `DataError`."""
    path = directory / STANDARDIZATION_JSON
    if not path.exists():
        return None
    try:
        return typed_json.decode(regular_file.read(path, MOST_BYTES), Standardization)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def of_checkpoint(directory: Path, known: str | None) -> Standardization | None:
    """What the run in `directory` standardized with, whose checkpoint has the fingerprint `known`. Raises `DataError` if the
    run has lost it or has another one."""
    if known is None:
        return None
    found = kept(directory)
    if found is None or found.fingerprint != known:
        path = directory / STANDARDIZATION_JSON
        raise DataError(f"{path}: does not hold what the run was standardized with; put it back")
    return found
