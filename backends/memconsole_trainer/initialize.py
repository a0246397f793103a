"""Random initial weights that are the same in every backend, on every machine, in any order."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.architecture import Architecture, Parameter, parameters


class InitialWeights:
    """A `WeightSource` whose every tensor depends on the seed and its own name alone.

    Each tensor has its own Philox counter (Salmon et al., SC 2011) keyed by (seed, name), so a
    backend may ask in any order, and changing one layer's shape leaves the others as they were.
    """

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self._parameters: dict[str, Parameter] = {p.name: p for p in parameters(architecture)}
        self._seed = seed

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The float32 tensor of `name`; nothing larger than the tensor itself is allocated.

        Raises KeyError for a name the architecture does not have.
        """
        return drawn(self._parameters[name], self._seed)


def drawn(parameter: Parameter, seed: int) -> NDArray[np.float32]:
    """The initial values of one weight."""
    if parameter.std == 0.0:
        return np.full(parameter.shape, parameter.fill, dtype=np.float32)
    values = np.empty(parameter.shape, dtype=np.float32)
    generator(seed, parameter.name).standard_normal(dtype=np.float32, out=values)
    values *= np.float32(parameter.std)
    if parameter.fill:
        values += np.float32(parameter.fill)
    return values


def generator(seed: int, name: str) -> np.random.Generator:
    """A random generator for one purpose, independent of every other name and seed."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))
