"""The linear systems of a window file: written beside the windows, read for closed-loop trials."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memconsole_trainer.systems.family import Matrix
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
    """(n,)"""
    control_max: Matrix
    """(m,)"""


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
    """The families of an open file, in the order of their variant ids; none if it lacks them."""
    found = []
    for name, group in file[GROUP].items() if GROUP in file else ():
        a, b, q, r, k, states = (np.array(group[m]) for m in (*_MATRICES, "states"))
        attrs = group.attrs
        variants = Variants(
            name, str(attrs["field"]), float(attrs["seconds"]), a, b, q, r, k, states
        )
        scale = file[NORMALIZATION][name]
        found.append(
            StoredFamily(
                int(attrs["first_variant"]),
                variants,
                np.array(scale["state_max"]),
                np.array(scale["control_max"]),
            )
        )
    return sorted(found, key=lambda family: family.first)


def family_names(file: Any) -> list[str]:
    """Names of the families of an open file that stores what each was divided by."""
    return list(file[NORMALIZATION]) if NORMALIZATION in file else []


def process_noise(file: Any) -> float:
    """Process noise of a step in an open file, as a share of the states' range."""
    return float(file.attrs.get("process_noise_std", 0.0))
