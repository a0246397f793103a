"""Random initial weights that are the same in every backend, on every machine, in any order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.model import Model, Parameter
from memconsole_trainer.randomness import drawn


class InitialWeights:
    """A `WeightSource` whose every tensor depends on the seed and its own name alone.

    Each tensor has its own Philox counter (Salmon et al., SC 2011) keyed by (seed, name), so a
    backend may ask in any order, and changing one layer's shape leaves the others as they were.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self._parameters: dict[str, Parameter] = {p.name: p for p in model.parameters()}
        self._seed = seed

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The float32 tensor of `name`; nothing larger than the tensor itself is allocated.

        Raises KeyError for a name the model does not have.
        """
        return drawn(self._parameters[name], self._seed)
