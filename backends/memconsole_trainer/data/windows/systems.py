"""The linear systems of a window file: written beside the windows, read for closed-loop trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.systems.family import Matrix
from memconsole_trainer.systems.features import MOST_CONTROLS, MOST_STATES
from memconsole_trainer.systems.variants import Variants

GROUP, NORMALIZATION = "systems", "normalization"
_MATRICES = ("A", "B", "Q", "R", "K")


@dataclass(frozen=True)
class StoredFamily:
    """The systems of one family, and what its states and controls were divided by."""

    first: int
    """The variant id of its first system."""
    variants: Variants
    state_max: Matrix
    """(n,): what each state was divided by."""
    control_max: Matrix
    """(m,): what each control was divided by."""


def write_systems(
    file: Any, families: Iterable[Variants], scales: Iterable[tuple[Matrix, Matrix]]
) -> None:
    """Write groups `systems/<family>` and `normalization/<family>`. A variant id counts the
    variants of all families in this order."""
    first = 0
    for variants, (states, controls) in zip(families, scales, strict=True):
        group = file.create_group(f"{GROUP}/{variants.family}")
        for name in _MATRICES:
            group[name] = getattr(variants, name.lower())
        group["states"] = variants.states
        group.attrs.update(
            {"field": variants.field, "seconds": variants.seconds, "first_variant": first}
        )
        first += variants.count
        group = file.create_group(f"{NORMALIZATION}/{variants.family}")
        group["state_max"], group["control_max"] = states, controls
        group.attrs.update({"n_states": variants.n_states, "n_inputs": variants.n_controls})


def read_systems(file: Any) -> list[StoredFamily]:
    """The families of an open file, in the order of their variant ids; none if it lacks them. Raises
    `DataError` with file and group if one is incomplete, of another shape or not finite."""
    found = []
    for name in file.get(GROUP, ()):
        a, b, q, r, k, states = (
            _array(file, f"{GROUP}/{name}/{m}") for m in (*_MATRICES, "states")
        )
        state_max, control_max = (
            _array(file, f"{NORMALIZATION}/{name}/{side}_max") for side in ("state", "control")
        )
        attrs = {key: _attribute(file, name, key) for key in ("field", "seconds", "first_variant")}
        n, m = len(states.reshape(-1)), len(control_max.reshape(-1))
        if n > MOST_STATES or m > MOST_CONTROLS:
            raise DataError(
                f"{file.filename}: {GROUP}/{name} has {n} states and {m} controls; expected at most "
                f"{MOST_STATES} and {MOST_CONTROLS}"
            )
        shapes = (len(a), n, n), (len(a), n, m), (n, n), (m, m), (len(a), m, n), (n,), (n,), (m,)
        arrays = (a, b, q, r, k, states, state_max, control_max)
        names = (*_MATRICES, "states", "state_max", "control_max")
        for of, array, shape in zip(names, arrays, shapes, strict=True):
            if array.shape != shape:
                raise DataError(
                    f"{file.filename}: {of} of system {name} has shape {array.shape}; expected {shape}"
                )
        variants = Variants(
            name, str(attrs["field"]), float(attrs["seconds"]), a, b, q, r, k, states
        )
        found.append(StoredFamily(int(attrs["first_variant"]), variants, state_max, control_max))
    return sorted(found, key=lambda family: family.first)


def _array(file: Any, name: str) -> Matrix:
    """An array of finite numbers. Raises `DataError`."""
    if name not in file:
        raise DataError(f"{file.filename}: lacks {name}; make the file again or leave out {GROUP}")
    values = np.array(file[name])
    if values.dtype.kind not in "fiu" or not values.ndim or not np.isfinite(values).all():
        raise DataError(f"{file.filename}: {name} holds what is not a finite number")
    return values.astype(np.float64)


def _attribute(file: Any, family: str, name: str) -> Any:
    attributes = file[GROUP][family].attrs
    if name not in attributes:
        raise DataError(f"{file.filename}: {GROUP}/{family} lacks the attribute {name}")
    return attributes[name]


def family_names(file: Any) -> list[str]:
    """Names of the families of an open file that stores what each was divided by."""
    return list(file[NORMALIZATION]) if NORMALIZATION in file else []


def normalization(file: Any) -> dict[str, dict[str, list[float]]]:
    """What the states and controls of each family of an open file were divided by: `state_max` and
    `control_max`. Raises `DataError` with file and family."""
    found: dict[str, dict[str, list[float]]] = {}
    for family in family_names(file):
        for name in ("state_max", "control_max"):
            values = _array(file, f"{NORMALIZATION}/{family}/{name}")
            found.setdefault(family, {})[name] = values.reshape(-1).tolist()
    return found


def output_scales(file: Any, families: Sequence[str], outputs: int) -> Matrix:
    """What the controls of each family of an open file were divided by (families, outputs); 0 for outputs
    that a family does not have. Raises `DataError` with file and family."""
    found = np.zeros((len(families), outputs))
    for row, family in zip(found, families, strict=True):
        name = f"{NORMALIZATION}/{family}/control_max"
        if name not in file:
            raise DataError(f"{file.filename}: lacks {name}, what controls were divided by")
        own = _array(file, name).reshape(-1)
        if len(own) > outputs:
            raise DataError(
                f"{file.filename}: {name} holds {len(own)} numbers; expected at most {outputs}"
            )
        row[: len(own)] = own
    return found


def process_noise(file: Any) -> float:
    """Process noise of a step in an open file, as a share of the states' range."""
    return float(file.attrs.get("process_noise_std", 0.0))
