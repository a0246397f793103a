"""A file of windows of zeros, for what prices or checks a plan and reads only shapes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from memconsole.plan.catalog.windows import DATASETS


def window_file(path: Path, rows: int = 1, length: int = 32) -> Path:
    """`rows` windows of `length` steps, of the catalog's 19 features to 6 outputs."""
    shapes = (rows, length, 19), (rows, 6), (rows, 6)
    with h5py.File(path, "w") as file:
        for name, shape in zip(DATASETS, shapes, strict=True):
            file[name] = np.zeros(shape, np.float32)
    return path
