"""Random numbers by seed and purpose, identical on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import Parameter


def generator(seed: int, name: str) -> np.random.Generator:
    """A random generator for one purpose. Streams of different names or seeds are independent."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


def drawn(parameter: Parameter, seed: int) -> NDArray[np.float32]:
    """Draw the initial values of one weight."""
    if parameter.std == 0.0:
        return np.full(parameter.shape, parameter.fill, dtype=np.float32)
    values = np.empty(parameter.shape, dtype=np.float32)
    generator(seed, parameter.name).standard_normal(dtype=np.float32, out=values)
    values *= np.float32(parameter.std)
    if parameter.fill:
        values += np.float32(parameter.fill)
    return values
